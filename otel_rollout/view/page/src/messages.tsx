// The messages of one history, as people write them, and which of them train.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { formatAddress } from "./address";
import { pathTo } from "./embedded";
import { useKeys } from "./hooks";
import { Folded } from "./long";
import { Code, Link, Markdown, Plain } from "./markdown";
import { Status } from "./overview";
import { source } from "./source";
import { Name, between, count, pretty, seconds, short } from "./text";
import type { Shown } from "./trajectory";
import { Tree } from "./tree";
import type { CompletionView, Detail, HistoryView, Node, ToolCall } from "./types";
import { type ListHandle, VirtualList } from "./virtual";

/** A message, the results of the tools that it called, and calls that failed after it. */
export interface Said {
  node: Node;
  place: number;
  results: Map<string, Node>;
  failed: CompletionView[];
}

/** The messages of a path; a tool's result is with the call that it answers. */
export function spoken(path: Node[], completions: CompletionView[]): Said[] {
  const said: Said[] = [];
  const calls = new Map<string, Said>();
  const failed = new Map<number, CompletionView[]>();
  for (const call of completions) {
    if (call.node === null && call.promptNode !== null) {
      failed.set(call.promptNode, [...(failed.get(call.promptNode) ?? []), call]);
    }
  }
  path.forEach((node, place) => {
    const caller = node.toolCallId === null ? undefined : calls.get(node.toolCallId);
    if (caller && node.toolCallId !== null && !caller.results.has(node.toolCallId)) {
      caller.results.set(node.toolCallId, node);
      caller.failed.push(...(failed.get(node.id) ?? []));
      return;
    }
    const one = { node, place, results: new Map(), failed: [...(failed.get(node.id) ?? [])] };
    for (const call of node.toolCalls) if (call.id !== null) calls.set(call.id, one);
    said.push(one);
  });
  return said;
}

/** The history that an address means: the one it names, else one with its message or row. */
export function chosenHistory(detail: Detail, address: Shown["address"]): HistoryView | undefined {
  const named = detail.histories.find((one) => one.number === address.history);
  if (named) return named;
  const { node, row } = address;
  const holds = (one: HistoryView) => pathTo(detail.nodes, one.leaf).some((step) => step.id === node);
  const byNode = node === undefined ? undefined : detail.histories.find(holds);
  const number = row === undefined ? null : detail.rows[row]?.history ?? null;
  return byNode ?? detail.histories.find((one) => one.number === number) ?? detail.histories[0];
}

const ALL_DRAWN = 150;

export function MessagesView(shown: Shown): JSX.Element {
  const { detail, address, move } = shown;
  const history = useMemo(() => chosenHistory(detail, address), [detail, address.history, address.node]);
  const said = useMemo(
    () => spoken(pathTo(detail.nodes, history?.leaf ?? null), detail.completions),
    [detail, history],
  );
  const [markdown, setMarkdown] = useState(true);
  const list = useRef<ListHandle>(null);
  const placeOf = (node: number | undefined) =>
    said.findIndex((one) => one.node.id === node || [...one.results.values()].some((r) => r.id === node));
  const at = placeOf(address.node);
  const choose = (place: number) => {
    const next = said[Math.max(0, Math.min(said.length - 1, place))];
    if (next) move({ node: next.node.id, ...(history ? { history: history.number } : {}) }, "replace");
  };
  const step = (by: number) => {
    const order = detail.histories;
    const next = order[order.findIndex((one) => one === history) + by];
    if (next) move({ history: next.number, node: undefined });
  };
  useEffect(() => {
    if (at >= 0) list.current?.show(at, "start");
  }, [at, history]);
  useKeys({
    j: () => choose(at + 1), ArrowDown: () => choose(at + 1),
    k: () => choose(at - 1), ArrowUp: () => choose(at - 1),
    "[": () => step(-1), "]": () => step(1),
  });
  return (
    <div class="messages-view">
      <Tree {...shown} history={history?.number ?? 0} />
      <section class="messages" aria-label="Messages">
        <div class="toolbar">
          <Finder {...shown} placeOf={placeOf} choose={choose} at={at} />
          <span class="spread" />
          {history && history.tools.length > 0 && (
            <details class="tools"><summary>{count(history.tools.length)} tools offered</summary>
              <p>{history.tools.map((name) => <span class="tag"><Name text={name} /></span>)}</p></details>
          )}
          <label><input type="checkbox" checked={markdown} onChange={() => setMarkdown(!markdown)} /> Markdown</label>
        </div>
        <VirtualList key={history?.number ?? 0} count={said.length} estimate={140} label="Messages" handle={list}
          overscan={said.length <= ALL_DRAWN ? ALL_DRAWN : 8}
          render={(index) => {
            const one = said[index];
            return one && <Message {...shown} said={one} history={history} markdown={markdown} chosen={index === at} />;
          }} />
      </section>
    </div>
  );
}

interface FinderProps extends Shown {
  placeOf(node: number): number;
  choose(place: number): void;
  at: number;
}

/** Search in the messages of this trajectory. */
function Finder({ detail, move, placeOf, choose, at }: FinderProps): JSX.Element {
  const [found, setFound] = useState<number[] | null>(null);
  const [error, setError] = useState<string | null>(null);
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const find = async (text: string) => {
    if (!text) return setFound(null);
    try {
      setFound(await source.search(detail.overview.id, text));
      setError(null);
    } catch (reason) {
      setError(String(reason));
    }
  };
  const next = () => {
    const here = (found ?? []).map(placeOf).filter((place) => place >= 0).sort((a, b) => a - b);
    const place = here.find((one) => one > at) ?? here[0];
    if (place !== undefined) choose(place);
    else if (found?.[0] !== undefined) move({ node: found[0], history: undefined });
  };
  return (
    <form class="finder" role="search" onSubmit={(event) => { event.preventDefault(); next(); }}>
      <label class="box"><span>find</span>
        <input ref={field} name="find" placeholder="in these messages" autocomplete="off" spellcheck={false}
          onChange={(event) => void find(event.currentTarget.value)} /></label>
      {found && <button type="submit" disabled={found.length === 0}>{count(found.length)} found{found.length > 0 && ", next ↓"}</button>}
      {error && <span class="error" role="alert">{error}</span>}
    </form>
  );
}

interface MessageProps extends Shown {
  said: Said;
  history: HistoryView | undefined;
  markdown: boolean;
  chosen: boolean;
}

function Message({ said, history, markdown, chosen, ...shown }: MessageProps): JSX.Element {
  const { node, place, results, failed } = said;
  const { detail } = shown;
  const call = node.completion === null ? undefined : detail.completions[node.completion];
  const trains = node.completion !== null && history?.trains.includes(node.completion) === true;
  const href = formatAddress({
    trajectory: shown.address.trajectory ?? "",
    view: "messages",
    ...(history ? { history: history.number } : {}),
    node: node.id,
  });
  const broken = history?.breaks.includes(node.id) === true;
  return (
    <article class={`message role-${roleOf(node.role)} ${trains ? "trains" : ""} ${chosen ? "chosen" : ""}`}
      aria-label={`${place + 1}, ${node.role}${trains ? ", trains" : ""}`} data-node={node.id}>
      <div class="margin-left">
        <span class="mark" title={trains ? "Trains here" : "Context: does not train here"}>{trains ? "●" : "○"}</span>
        <a class="place" href={href} title="A link to this message">{place + 1}</a>
      </div>
      <div class="content">
        <h3><Name text={node.role} />{node.parts && <Parts parts={node.parts} />}</h3>
        {node.reasoning !== null && (
          <details class="reasoning"><summary>reasoning · {count(node.reasoning.length)} characters</summary>
            <Plain text={node.reasoning} /></details>
        )}
        {broken && <p class="note warn">Replayed without its reasoning: the model did not see those tokens again.</p>}
        <Body node={node} markdown={markdown} id={detail.overview.id} />
        {node.toolCalls.map((one) => (
          <ToolCallCard call={one} result={one.id === null ? undefined : results.get(one.id)} id={detail.overview.id} />
        ))}
        {failed.map((one) => <Failed call={one} />)}
      </div>
      <div class="margin-right">{call && <CallFacts call={call} trains={trains} history={history} {...shown} />}</div>
    </article>
  );
}

function roleOf(role: string): string {
  return ["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other";
}

function Parts({ parts }: { parts: string[] }): JSX.Element {
  return <>{parts.map((kind) => <span class="tag"><Name text={kind} /></span>)}</>;
}

function Body({ node, markdown, id }: { node: Node; markdown: boolean; id: string }): JSX.Element {
  const written = ["assistant", "user", "system", "developer"].includes(node.role);
  const draw = (text: string): ComponentChildren => {
    if (!written) return <Plain text={pretty(text)} />;
    return markdown ? <Markdown text={text} /> : <Plain text={text} />;
  };
  return (
    <>
      {node.text !== "" && <Folded node={node} id={id} draw={draw} />}
      {node.images.map((address) => /^data:image\//i.test(address) && <img src={address} alt="An image of this message" />)}
      {node.links.map((address) => <p><Link address={address} /></p>)}
    </>
  );
}

function ToolCallCard({ call, result, id }: { call: ToolCall; result: Node | undefined; id: string }): JSX.Element {
  return (
    <div class="tool-call" role="group" aria-label={`Call of ${call.name}`}>
      <header>
        <span class="tool-name"><Name text={call.name} /></span>
        {call.id !== null && <span class="id"><Name text={call.id} /></span>}
      </header>
      <Arguments text={call.arguments} />
      {result ? (
        <div class="result" data-node={result.id}>
          <h4>result</h4>
          <Body node={result} markdown={false} id={id} />
        </div>
      ) : <p class="note">No result in this history.</p>}
    </div>
  );
}

const SHORT_ARGUMENTS = 100;

function Arguments({ text }: { text: string }): JSX.Element {
  if (text === "" || text === "{}") return <></>;
  const shown = text.length <= SHORT_ARGUMENTS && !text.includes("\\n") ? text : pretty(text);
  return <Code text={shown} language="" />;
}

function Failed({ call }: { call: CompletionView }): JSX.Element {
  return (
    <p class="note bad">
      A call after this message ended as <Status value={call.status} />
      {call.error && <> <Name text={`${call.error.type}: ${call.error.message}`} /></>}
      {" "}after {seconds(between(call.start, call.end))}
    </p>
  );
}

interface FactsProps extends Shown {
  call: CompletionView;
  trains: boolean;
  history: HistoryView | undefined;
}

function CallFacts({ call, trains, history, detail, move }: FactsProps): JSX.Element {
  const elsewhere = detail.histories.find((one) => one !== history && one.trains.some((n) => detail.completions[n] === call));
  return (
    <>
      <p class={trains ? "verdict good" : "verdict"}>{trains ? "● trains" : whyNot(call, elsewhere)}</p>
      {call.status !== "complete" && <p><Status value={call.status} /></p>}
      <dl>
        {call.model !== null && <div><dt>model</dt><dd><Name text={call.model} /></dd></div>}
        {call.policyVersion !== null && <div><dt>version</dt><dd><Name text={String(call.policyVersion)} /></dd></div>}
        <div><dt>tokens</dt><dd title="prompt, then sampled">{short(call.promptTokens)} + {short(call.sampledTokens)}</dd></div>
        <div><dt>time</dt><dd>{seconds(between(call.start, call.end))}</dd></div>
        {call.finishReason !== null && <div><dt>finish</dt><dd><Name text={call.finishReason} />{call.truncated && " (cut)"}</dd></div>}
        {call.attempts > 1 && <div><dt>attempts</dt><dd>{call.attempts}</dd></div>}
        {call.reward !== null && <div><dt>reward</dt><dd><b>{short(call.reward)}</b></dd></div>}
      </dl>
      {call.row !== null && (
        <button type="button" class="link" onClick={() => move({ view: "tokens", row: call.row ?? 0, token: call.rowStart ?? 0 })}>
          its tokens →
        </button>
      )}
    </>
  );
}

function whyNot(call: CompletionView, elsewhere: HistoryView | undefined): string {
  if (elsewhere) return `○ trains in history ${elsewhere.number}`;
  if (call.sideCall !== null) return `○ side call: ${call.sideCall}`;
  return `○ ${call.dropped ?? "does not train"}`;
}
