// One message as people write them, with what its call was, and whether it trains.

import type { ComponentChildren, JSX } from "preact";

import { formatAddress } from "./address";
import { Folded } from "./long";
import { Code, Link, Markdown, Plain } from "./markdown";
import { Status } from "./overview";
import { inBrackets, pretty } from "./pretty";
import type { Said } from "./said";
import { Name, Prose, between, count, seconds, short } from "./text";
import type { Shown } from "./trajectory";
import type { CompletionView, HistoryView, Node, ToolCall } from "./types";

interface MessageProps extends Shown {
  said: Said;
  history: HistoryView | undefined;
  markdown: boolean;
  chosen: boolean;
}

export function Message({ said, history, markdown, chosen, ...shown }: MessageProps): JSX.Element {
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
    <article
      class={`message role-${roleOf(node.role)} ${trains ? "trains" : ""} ${chosen ? "chosen" : ""}`}
      aria-label={`${place + 1}, ${node.role}${trains ? ", trains" : ""}`}
      data-node={node.id}
    >
      <div class="margin-left">
        <span class="mark" title={trains ? "Trains here" : "Context: does not train here"}>
          {trains ? "●" : "○"}
        </span>
        <a class="place" href={href} title="A link to this message">
          {place + 1}
        </a>
      </div>
      <div class="content">
        <h3>
          <Name text={node.role} />
          {node.parts && <Parts parts={node.parts} />}
        </h3>
        {node.reasoning !== null && (
          <details class="reasoning">
            <summary>reasoning · {count(node.reasoning.length)} characters</summary>
            <Plain text={node.reasoning} />
          </details>
        )}
        {broken && (
          <p class="note warn">Replayed without its reasoning: the model did not see those tokens again.</p>
        )}
        <Body node={node} markdown={markdown} id={detail.overview.id} />
        {node.toolCalls.map((one) => (
          <ToolCallCard
            call={one}
            result={one.id === null ? undefined : results.get(one.id)}
            id={detail.overview.id}
          />
        ))}
        {failed.map((one) => (
          <Failed call={one} />
        ))}
      </div>
      <div class="margin-right">
        {call && <CallFacts call={call} trains={trains} history={history} {...shown} />}
      </div>
    </article>
  );
}

function roleOf(role: string): string {
  return ["system", "developer", "user", "assistant", "tool"].includes(role) ? role : "other";
}

function Parts({ parts }: { parts: string[] }): JSX.Element {
  return (
    <>
      {parts.map((kind) => (
        <span class="tag">
          <Name text={kind} />
        </span>
      ))}
    </>
  );
}

/** Longer results of tools begin folded. */
const RESULT_LINES = 16;

function Body({ node, markdown, id }: { node: Node; markdown: boolean; id: string }): JSX.Element {
  const written = ["assistant", "user", "system", "developer"].includes(node.role);
  const draw = (text: string): ComponentChildren => {
    if (!written) return <Plain text={pretty(text)} />;
    return markdown ? <Markdown text={text} /> : <Plain text={text} />;
  };
  return (
    <>
      {node.text !== "" && (
        <Folded node={node} id={id} draw={draw} lines={written ? Infinity : RESULT_LINES} />
      )}
      {node.images.map(
        (address) => /^data:image\//i.test(address) && <img src={address} alt="An image of this message" />,
      )}
      {node.links.map((address) => (
        <p>
          <Link address={address} />
        </p>
      ))}
    </>
  );
}

function ToolCallCard({
  call,
  result,
  id,
}: {
  call: ToolCall;
  result: Node | undefined;
  id: string;
}): JSX.Element {
  const short = call.arguments.length <= SHORT_ARGUMENTS ? inBrackets(call.arguments) : null;
  return (
    <div class="tool-call" role="group" aria-label={`Call of ${call.name}`}>
      <header>
        <span class="tool-name">
          <Name text={call.name} />
          <span class="tool-arguments">({short === null ? "…" : <Name text={short} />})</span>
        </span>
        {call.id !== null && (
          <span class="id">
            <Name text={call.id} />
          </span>
        )}
      </header>
      {short === null && <Arguments text={call.arguments} />}
      {result ? (
        <div class="result" data-node={result.id}>
          <h4>result</h4>
          <Body node={result} markdown={false} id={id} />
        </div>
      ) : (
        <p class="note">No result in this history.</p>
      )}
    </div>
  );
}

const SHORT_ARGUMENTS = 100;

function Arguments({ text }: { text: string }): JSX.Element {
  if (text === "" || text === "{}") return <></>;
  const shown = text.length <= SHORT_ARGUMENTS && !/\\[nu]/.test(text) ? text : pretty(text);
  return <Code text={shown} language="" />;
}

function Failed({ call }: { call: CompletionView }): JSX.Element {
  return (
    <div class="note bad failed-call" role="alert">
      <p>
        The call after this message ended as <Status value={call.status} />
        {call.statusCode !== null && ` with HTTP status ${call.statusCode}`} after{" "}
        {seconds(between(call.start, call.end))}
        {call.requestModel !== null && (
          <>
            {" "}
            · model <Name text={call.requestModel} />
          </>
        )}
      </p>
      {call.error && (
        <p class="failed-error">
          <b>
            <Name text={call.error.type} />
          </b>{" "}
          <Prose text={call.error.message} />
        </p>
      )}
      {Object.keys(call.sampling).length > 0 && (
        <p>
          asked with{" "}
          <code>
            <Name text={JSON.stringify(call.sampling)} />
          </code>
        </p>
      )}
    </div>
  );
}

interface FactsProps extends Shown {
  call: CompletionView;
  trains: boolean;
  history: HistoryView | undefined;
}

function CallFacts({ call, trains, history, detail, move }: FactsProps): JSX.Element {
  const elsewhere = detail.histories.find(
    (one) => one !== history && one.trains.some((n) => detail.completions[n] === call),
  );
  return (
    <>
      <p class={trains ? "verdict good" : "verdict"}>{trains ? verdict(call) : whyNot(call, elsewhere)}</p>
      {call.status !== "complete" && (
        <p>
          <Status value={call.status} />
        </p>
      )}
      <dl>
        {call.model !== null && (
          <div>
            <dt>model</dt>
            <dd>
              <Name text={call.model} />
            </dd>
          </div>
        )}
        {call.policyVersion !== null && (
          <div>
            <dt>version</dt>
            <dd>
              <Name text={String(call.policyVersion)} />
            </dd>
          </div>
        )}
        <div>
          <dt>tokens</dt>
          <dd title="prompt, then sampled">
            {short(call.promptTokens)} + {short(call.sampledTokens)}
          </dd>
        </div>
        <div>
          <dt>time</dt>
          <dd>{seconds(between(call.start, call.end))}</dd>
        </div>
        {call.finishReason !== null && (
          <div>
            <dt>finish</dt>
            <dd>
              <Name text={call.finishReason} />
              {call.truncated && " (cut)"}
            </dd>
          </div>
        )}
        {call.attempts > 1 && (
          <div>
            <dt>attempts</dt>
            <dd>{call.attempts}</dd>
          </div>
        )}
        {call.reward !== null && (
          <div>
            <dt>reward</dt>
            <dd>
              <b>{short(call.reward)}</b>
            </dd>
          </div>
        )}
      </dl>
      {call.row !== null && (
        <button
          type="button"
          class="link"
          onClick={() => move({ view: "tokens", row: call.row ?? 0, token: call.rowStart ?? 0 })}
        >
          its tokens →
        </button>
      )}
    </>
  );
}

function verdict(call: CompletionView): string {
  return call.dropped === null ? "● trains" : `● trains as a message alone: ${call.dropped}`;
}

function whyNot(call: CompletionView, elsewhere: HistoryView | undefined): string {
  if (elsewhere) return `○ trains in history ${elsewhere.number + 1}`;
  if (call.sideCall !== null) return `○ side call: ${call.sideCall}`;
  return `○ ${call.dropped ?? "does not train"}`;
}
