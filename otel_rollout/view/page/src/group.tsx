// The samples of one task side by side, and where they first differ.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { formatAddress, go } from "./address";
import { Compact, sharedByAll } from "./compact";
import { pathTo } from "./embedded";
import { messageOf, useKeys, useLoaded } from "./hooks";
import { Status } from "./overview";
import { revision, source } from "./source";
import {
  Name,
  Prose,
  beginning,
  count,
  ending,
  many,
  plain,
  seconds,
  short,
  shortId,
  signed,
  tokenSum,
  tokens,
} from "./text";
import type { Detail, Group, Node, Overview, State } from "./types";

/** So many samples stand side by side at once, with so many messages. */
const COLUMNS = 8;
const MESSAGES = 60;

export function GroupView({ id, state }: { id: string; state: State }): JSX.Element {
  const { value: group, error } = useLoaded(() => source.group(id), `${id} ${revision(state)}`, id);
  if (error !== null && !group)
    return (
      <p class="hint error" role="alert">
        {error}
      </p>
    );
  return group ? <Members group={group} /> : <p class="hint">Reading…</p>;
}

function Members({ group }: { group: Group }): JSX.Element {
  const [first, setFirst] = useState(0);
  const [picked, setPicked] = useState<string[]>([]);
  const shown = group.members.slice(first, first + COLUMNS);
  const details = useDetails(shown);
  const pick = (id: string) =>
    setPicked((was) => (was.includes(id) ? was.filter((one) => one !== id) : [...was.slice(-1), id]));
  const scored = group.members.filter((one) => one.reward !== null).map((one) => one.reward as number);
  const mean = scored.length ? scored.reduce((sum, one) => sum + one, 0) / scored.length : null;
  const failed = group.members.filter((one) => one.status === "error" || one.status === "cancelled").length;
  const sumOf = (name: "prompt_tokens" | "sampled_tokens") => {
    const known = group.members.map((one) => one[name]).filter((one) => one !== null);
    return tokenSum(
      known.length ? known.reduce((sum, one) => sum + one, 0) : null,
      known.length,
      group.members.length,
    );
  };
  const turn = (by: number) => setFirst(Math.max(0, Math.min(group.members.length - 1, first + by)));
  useKeys({ ArrowRight: () => turn(1), ArrowLeft: () => turn(-1), l: () => turn(1), h: () => turn(-1) });
  const [a, b] = picked;
  const isRandom = shortId(group.id) !== group.id;
  return (
    <div class="group-view">
      <header class="head">
        <h1>
          <Name text={isRandom ? (group.task ?? shortId(group.id)) : group.id} />
        </h1>
        {group.task !== null && group.task !== group.id && (
          <span class="id">
            {isRandom ? "group " : "task "}
            <Name text={isRandom ? shortId(group.id) : group.task} title={isRandom ? group.id : group.task} />
          </span>
        )}
        <span class="muted">
          {many(group.members.length, "sample")} · {scored.length} scored ·{" "}
          {failed > 0 && <span class="bad">{failed} failed · </span>}
          mean reward {short(mean)} · tokens: prompt {sumOf("prompt_tokens")}, sampled{" "}
          {sumOf("sampled_tokens")}
        </span>
        <FirstDifference group={group} />
        <span class="spread" />
        {group.members.length > COLUMNS && (
          <>
            <button type="button" onClick={() => turn(-COLUMNS)} disabled={first === 0}>
              ←
            </button>
            <span class="muted">
              {first + 1}–{Math.min(group.members.length, first + COLUMNS)} of {count(group.members.length)}
            </span>
            <button
              type="button"
              onClick={() => turn(COLUMNS)}
              disabled={first + COLUMNS >= group.members.length}
            >
              →
            </button>
          </>
        )}
        <button
          type="button"
          class="primary"
          disabled={a === undefined || b === undefined}
          onClick={() => a !== undefined && b !== undefined && go({ diff: [a, b] })}
        >
          Compare the two picked
        </button>
        {group.question !== null && (
          <p class="head-task" title={plain(group.question)}>
            <Prose text={beginning(group.question, 400)} />
          </p>
        )}
      </header>
      <div
        class="columns"
        role="table"
        aria-label="Samples side by side"
        style={{ "--columns": shown.length }}
      >
        <div class="columns-row heads" role="row">
          {shown.map((one) => (
            <Head
              key={one.id}
              one={one}
              group={group}
              picked={picked.includes(one.id)}
              pick={() => pick(one.id)}
            />
          ))}
        </div>
        <Messages shown={shown} details={details} group={group} />
      </div>
    </div>
  );
}

/** The trajectories in full, as they come. */
function useDetails(members: Overview[]): Map<string, Detail | string> {
  const [known, set] = useState(new Map<string, Detail | string>());
  useEffect(() => {
    for (const { id } of members) {
      const keep = (value: Detail | string) => set((was) => new Map(was).set(id, value));
      source.trajectory(id).then(keep, (reason: unknown) => keep(messageOf(reason)));
    }
  }, [members.map((one) => one.id).join()]);
  return known;
}

function FirstDifference({ group }: { group: Group }): JSX.Element {
  const { first } = group;
  if (!first || first.place.kind === "none") return <></>;
  return (
    <a href={formatAddress({ diff: [first.a, first.b] })} class="first-difference">
      first difference: {first.place.kind}{" "}
      {count(first.place.position + Number(first.place.kind === "message"))}
    </a>
  );
}

function Head({
  one,
  group,
  picked,
  pick,
}: {
  one: Overview;
  group: Group;
  picked: boolean;
  pick(): void;
}): JSX.Element {
  const most = Math.max(1e-9, ...group.members.map((member) => Math.abs(member.advantage ?? 0)));
  const share = ((one.advantage ?? 0) / most) * 50;
  return (
    <div class="column-head" role="columnheader">
      <label class="pick">
        <input type="checkbox" checked={picked} onChange={pick} />{" "}
        {one.sample_index === null ? "sample" : `sample ${one.sample_index}`}
      </label>
      <a href={formatAddress({ trajectory: one.id })}>
        <Name text={one.id.slice(0, 12)} title={one.id} />
      </a>
      <div class="big-reward">
        {short(one.reward)}{" "}
        <span class="advantage">{one.advantage === null ? "" : signed(one.advantage)}</span>
      </div>
      <svg class="advantage-bar" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
        <rect class="ground" width="100" height="4" />
        <rect
          class={share < 0 ? "loss" : "gain"}
          x={share < 0 ? 50 + share : 50}
          width={Math.abs(share)}
          height="4"
        />
        <rect class="zero" x="49.7" width="0.6" height="4" />
      </svg>
      <p>
        <Status value={one.status} /> · {many(one.turns, "turn")} · {seconds(one.seconds)}
        <br />
        tokens: prompt {tokens(one.prompt_tokens)}, sampled {tokens(one.sampled_tokens)}
      </p>
      <p class={one.error === null ? "column-end muted" : "column-end bad"} title={plain(ending(one))}>
        <Prose text={beginning(ending(one), 160)} />
      </p>
      <p>
        {one.findings.map((kind) => (
          <span class={`kind ${kind}`}>{kind}</span>
        ))}
      </p>
    </div>
  );
}

function Messages({
  shown,
  details,
  group,
}: {
  shown: Overview[];
  details: Map<string, Detail | string>;
  group: Group;
}): JSX.Element {
  const paths = shown.map((one): Node[] | string => {
    const detail = details.get(one.id);
    return typeof detail === "object"
      ? pathTo(detail.nodes, detail.histories[0]?.leaf ?? null)
      : (detail ?? "Reading…");
  });
  const longest = Math.max(0, ...paths.map((path) => (typeof path === "string" ? 1 : path.length)));
  const differs = firstDifferent(paths, group);
  const differing = paths.flatMap((path) =>
    differs === null || typeof path === "string" ? [] : (path[differs] ?? []),
  );
  const same = {
    same: sharedByAll(differing.map((node) => node.text)),
    sameReasoning: sharedByAll(differing.map((node) => node.reasoning ?? "")),
  };
  return (
    <>
      {Array.from({ length: Math.min(MESSAGES, longest) }, (_, place) => (
        <div
          class={`columns-row ${place === differs ? "differs" : ""} ${differs !== null && place < differs ? "same" : ""}`}
          role="row"
        >
          {sharedBy(differs !== null && place < differs ? paths : [], place).map((node) => (
            <div class={`column-cell shared role-${node.role}`} role="cell" aria-colspan={paths.length}>
              <Compact node={node} />
            </div>
          ))}
          {paths.map((path, column) => {
            if (differs !== null && place < differs && sharedBy(paths, place).length > 0) return null;
            const node = typeof path === "string" ? undefined : path[place];
            return (
              <div class={`column-cell role-${node?.role ?? "none"}`} role="cell" key={shown[column]?.id}>
                {node ? (
                  <Compact node={node} {...(place === differs ? same : {})} />
                ) : place === 0 && typeof path === "string" ? (
                  path
                ) : (
                  ""
                )}
              </div>
            );
          })}
        </div>
      ))}
      {longest > MESSAGES && (
        <p class="muted">{count(longest - MESSAGES)} more messages: open a sample to see them.</p>
      )}
    </>
  );
}

/** The message that all columns have at a place, as they are the same up to there; empty: not all. */
function sharedBy(paths: (Node[] | string)[], place: number): Node[] {
  const nodes = paths.map((path) => (typeof path === "string" ? undefined : path[place]));
  return nodes[0] && nodes.every((node) => node !== undefined) ? [nodes[0]] : [];
}

/** The first message that is not the same in all columns. */
function firstDifferent(paths: (Node[] | string)[], group: Group): number | null {
  const known = paths.filter((path): path is Node[] => typeof path !== "string");
  const key = (node: Node | undefined) =>
    node &&
    JSON.stringify([node.role, node.text, node.reasoning, node.toolCalls.map((c) => [c.name, c.arguments])]);
  for (let place = 0; known.length > 1 && place < (known[0]?.length ?? 0); place++) {
    if (new Set(known.map((path) => key(path[place]))).size > 1) return place;
  }
  return group.first?.place.kind === "message" ? group.first.place.position : null;
}
