// One trajectory: what it is in a line, and five ways to look at it.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import { type Address, type Change, VIEWS, type View, changedBy, formatAddress, go } from "./address";
import { FindingsView } from "./findings";
import { useKeys, useLoaded } from "./hooks";
import { MessagesView } from "./messages";
import { Status } from "./overview";
import { RawView } from "./raw";
import { source } from "./source";
import { Name, Prose, beginning, count, many, plain, seconds, short, shortId, signed } from "./text";
import { TimeView } from "./time";
import { TokensView } from "./tokens";
import type { Detail, State } from "./types";

export interface Shown {
  detail: Detail;
  address: Address;
  /** Goes to another place of this trajectory. */
  move(change: Change, how?: "push" | "replace"): void;
}

export function TrajectoryView({ address, state }: { address: Address; state: State }): JSX.Element {
  const id = address.trajectory ?? "";
  const [newest, setNewest] = useState(0);
  const { value: detail, error } = useLoaded(
    () => source.trajectory(id),
    `${id} ${state.complete} ${newest}`,
    id,
  );
  useEffect(() => {
    if (detail && state.open === id && (state.changed ?? 0) > detail.changed) setNewest(state.changed ?? 0);
  }, [detail, id, state]);
  const view = address.view ?? "messages";
  const move = (change: Change, how?: "push" | "replace") =>
    go(changedBy({ trajectory: id, view, ...only(address) }, change), how);
  const group = detail?.overview.group_id;
  useKeys({
    ...Object.fromEntries(VIEWS.map((name, place) => [String(place + 1), () => move({ view: name })])),
    "6": () => group && go({ group }),
  });
  if (error !== null && !detail)
    return (
      <p class="hint error" role="alert">
        {error}
      </p>
    );
  if (!detail) return <p class="hint">Reading…</p>;
  const shown = { detail, address, move };
  return (
    <div class="trajectory-view">
      <Head detail={detail} />
      <Tabs detail={detail} address={address} view={view} />
      <div class="view" role="tabpanel" aria-label={titleOf(view)}>
        {view === "messages" && <MessagesView {...shown} />}
        {view === "tokens" && <TokensView {...shown} />}
        {view === "findings" && <FindingsView {...shown} />}
        {view === "time" && <TimeView {...shown} />}
        {view === "raw" && <RawView {...shown} />}
      </div>
    </div>
  );
}

/** The part of an address that is a place in a trajectory. */
function only({ history, node, row, token, signal, search }: Address): Address {
  const all = { history, node, row, token, signal, search };
  return changedBy({}, all);
}

function Head({ detail }: { detail: Detail }): JSX.Element {
  const { overview, parent, trace, error } = detail;
  return (
    <header class="head">
      <h1>
        <Name text={overview.name} />
      </h1>
      <span class="id">
        <Name text={overview.id} />
      </span>
      <Status value={overview.status} />
      {overview.termination_reason !== null && overview.termination_reason !== overview.status && (
        <span class="muted">
          <Name text={overview.termination_reason} />
        </span>
      )}
      <span class="spread" />
      {parent && (
        <a href={formatAddress({ trajectory: parent.id })}>
          inside <Name text={parent.name} />
        </a>
      )}
      {trace !== null && /^https?:/i.test(trace) && (
        <a href={trace} target="_blank" rel="noreferrer noopener">
          trace in Jaeger ↗
        </a>
      )}
      <Facts detail={detail} />
      {overview.question !== null && (
        <p class="head-task" title={plain(overview.question)}>
          <Prose text={beginning(overview.question, 300)} />
        </p>
      )}
      {error && (
        <a class="head-error" href={formatAddress({ trajectory: overview.id, view: "raw" })}>
          <b>
            <Name text={error.type} />
          </b>{" "}
          <Prose text={error.message} />
        </a>
      )}
    </header>
  );
}

/** Named rewards and metrics; the details have all of them. */
const MOST_NUMBERS = 8;

function Facts({ detail }: { detail: Detail }): JSX.Element {
  const { overview, completions } = detail;
  const { group_id, task_id } = overview;
  const known = completions.reduce((sum, one) => sum + (one.sampledTokens ?? 0), 0);
  const sampled = overview.sampled_tokens === null && known > 0 ? `${count(known)} or more` : null;
  return (
    <dl class="facts">
      <Fact name="reward" value={<b>{overview.reward === null ? "none" : short(overview.reward)}</b>} />
      {overview.advantage !== null && <Fact name="advantage" value={signed(overview.advantage)} />}
      {task_id !== null && <Fact name="task" value={<Name text={task_id} />} />}
      {group_id !== null && (
        <Fact
          name="group"
          value={
            <a href={formatAddress({ group: group_id })}>
              <Name text={shortId(group_id)} title={group_id} />
            </a>
          }
        />
      )}
      {overview.sample_index !== null && <Fact name="sample" value={short(overview.sample_index)} />}
      <Fact name="turns" value={count(overview.turns)} />
      <Fact name="calls" value={count(overview.calls)} />
      <Fact name="histories" value={count(overview.histories)} />
      <Fact name="prompt tokens" value={count(overview.prompt_tokens)} />
      <Fact name="sampled" value={sampled ?? count(overview.sampled_tokens)} />
      <Fact name="trained" value={count(overview.trained_tokens)} />
      {overview.dropped > 0 && <Fact name="dropped" value={many(overview.dropped, "reply")} />}
      <Fact name="time" value={seconds(overview.seconds)} />
      {overview.versions.length > 0 && (
        <Fact name="version" value={<Name text={overview.versions.join(", ")} />} />
      )}
      {overview.models.length > 0 && <Fact name="model" value={<Name text={overview.models.join(", ")} />} />}
      {[...Object.entries(overview.rewards), ...Object.entries(overview.metrics)]
        .slice(0, MOST_NUMBERS)
        .map(([name, value]) => (
          <Fact name={plain(name)} value={short(value)} />
        ))}
    </dl>
  );
}

export function Fact({ name, value }: { name: string; value: JSX.Element | string }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

const TITLES: Partial<Record<View, string>> = { findings: "Not trained", raw: "Details" };
const titleOf = (view: View) => TITLES[view] ?? `${view[0]?.toUpperCase()}${view.slice(1)}`;

function Tabs({ detail, address, view }: { detail: Detail; address: Address; view: View }): JSX.Element {
  const notes: Partial<Record<View, number>> = {
    messages: detail.nodes.length,
    tokens: detail.rows.reduce((sum, row) => sum + row.length, 0),
    findings: detail.findings.length,
  };
  return (
    <nav class="tabs" role="tablist" aria-label="Views">
      {VIEWS.map((name, place) => (
        <a
          key={name}
          role="tab"
          aria-selected={name === view}
          title={`${titleOf(name)} (${place + 1})`}
          href={formatAddress({ trajectory: address.trajectory ?? "", view: name, ...only(address) })}
        >
          {titleOf(name)}
          {notes[name] !== undefined && <span class="muted">{count(notes[name])}</span>}
        </a>
      ))}
    </nav>
  );
}
