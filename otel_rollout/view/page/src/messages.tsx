// The messages of one history, beside the tree of all histories.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { pathTo } from "./embedded";
import { messageOf, useKeys } from "./hooks";
import { Message } from "./message";
import { chosenHistory, shownLeaf, spoken } from "./said";
import { source } from "./source";
import { Name, count } from "./text";
import type { Shown } from "./trajectory";
import { Tree } from "./tree";
import { type ListHandle, VirtualList } from "./virtual";

const ALL_DRAWN = 150;

export function MessagesView(shown: Shown): JSX.Element {
  const { detail, address, move } = shown;
  const history = useMemo(() => chosenHistory(detail, address), [detail, address.history, address.node]);
  const said = useMemo(
    () => spoken(pathTo(detail.nodes, shownLeaf(detail, address, history)), detail.completions),
    [detail, history, history ? null : address.node],
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
    // The call that failed is below its prompt.
    else if (!history && said.length > 0) list.current?.show(said.length - 1, "start");
  }, [at, history]);
  useKeys({
    j: () => choose(at + 1),
    ArrowDown: () => choose(at + 1),
    k: () => choose(at - 1),
    ArrowUp: () => choose(at - 1),
    "[": () => step(-1),
    "]": () => step(1),
  });
  if (detail.nodes.length === 0) {
    return (
      <div class="hint">
        <p>No message: no model call of this rollout was captured.</p>
        <button type="button" class="link" onClick={() => move({ view: "findings" })}>
          Why does this not train?
        </button>
      </div>
    );
  }
  return (
    <div class="messages-view">
      <Tree {...shown} history={history?.number ?? null} />
      <section class="messages" aria-label="Messages">
        <div class="toolbar">
          <Finder {...shown} placeOf={placeOf} choose={choose} at={at} />
          <span class="spread" />
          {history && history.tools.length > 0 && (
            <details class="tools">
              <summary>{count(history.tools.length)} tools offered</summary>
              <p>
                {history.tools.map((name) => (
                  <span class="tag">
                    <Name text={name} />
                  </span>
                ))}
              </p>
            </details>
          )}
          <label>
            <input type="checkbox" checked={markdown} onChange={() => setMarkdown(!markdown)} /> Markdown
          </label>
        </div>
        <VirtualList
          key={history?.number ?? 0}
          count={said.length}
          estimate={140}
          label="Messages"
          handle={list}
          overscan={said.length <= ALL_DRAWN ? ALL_DRAWN : 8}
          render={(index) => {
            const one = said[index];
            return (
              one && (
                <Message {...shown} said={one} history={history} markdown={markdown} chosen={index === at} />
              )
            );
          }}
        />
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
function Finder({ detail, address, move, placeOf, choose, at }: FinderProps): JSX.Element {
  const [found, setFound] = useState<number[] | null>(null);
  const [error, setError] = useState<string | null>(null);
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const given = address.search ?? "";
  useEffect(() => void find(given), [given, detail.overview.id]);
  const find = async (text: string) => {
    if (!text) return setFound(null);
    try {
      const nodes = await source.search(detail.overview.id, text);
      setFound(nodes);
      setError(null);
      if (text === given && address.node === undefined && nodes[0] !== undefined) {
        move({ node: nodes[0], history: undefined }, "replace");
      }
    } catch (reason) {
      setError(messageOf(reason));
    }
  };
  const next = () => {
    const here = (found ?? [])
      .map(placeOf)
      .filter((place) => place >= 0)
      .sort((a, b) => a - b);
    const place = here.find((one) => one > at) ?? here[0];
    if (place !== undefined) choose(place);
    else if (found?.[0] !== undefined) move({ node: found[0], history: undefined });
  };
  return (
    <form
      class="finder"
      role="search"
      onSubmit={(event) => {
        event.preventDefault();
        next();
      }}
    >
      <label class="box">
        <span>find</span>
        <input
          ref={field}
          name="find"
          placeholder="in these messages"
          autocomplete="off"
          spellcheck={false}
          defaultValue={given}
          onChange={(event) => void find(event.currentTarget.value)}
        />
      </label>
      {found && (
        <button type="submit" disabled={found.length === 0}>
          {count(found.length)} found{found.length > 0 && ", next ↓"}
        </button>
      )}
      {error && (
        <span class="error" role="alert">
          {error}
        </span>
      )}
    </form>
  );
}
