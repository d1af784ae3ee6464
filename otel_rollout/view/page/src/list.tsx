// The first view: all trajectories, in charts and as a table that can be sorted and filtered.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { type Address, type Change, changedBy, formatAddress, go } from "./address";
import { useKeys, useLoaded, usePages } from "./hooks";
import { Overviews, Status } from "./overview";
import { source } from "./source";
import { Name, count, seconds, short, signed } from "./text";
import { type Overview, type State, revision } from "./types";
import { type ListHandle, VirtualList } from "./virtual";

interface Column {
  field: keyof Overview;
  head: string;
  title: string;
  number?: boolean;
  cell(row: Overview): JSX.Element | string;
}

const COLUMNS: Column[] = [
  { field: "name", head: "Trajectory", title: "Name, and the beginning of its id", cell: (row) => (
    <><Name text={row.name} /> <span class="id"><Name text={row.id.slice(0, 8)} title={row.id} /></span></>) },
  { field: "task_id", head: "Task", title: "Task", cell: (row) => <Known text={row.task_id} /> },
  { field: "group_id", head: "Group", title: "Group", cell: (row) => <Known text={row.group_id} /> },
  { field: "sample_index", head: "#", title: "Sample of its group", number: true, cell: (row) => short(row.sample_index) },
  { field: "status", head: "Status", title: "How it ended", cell: (row) => <Status value={row.status} /> },
  { field: "reward", head: "Reward", title: "Reward", number: true, cell: (row) => <b>{short(row.reward)}</b> },
  { field: "advantage", head: "Adv.", title: "Advantage in its group", number: true, cell: (row) => signed(row.advantage) },
  { field: "turns", head: "Turns", title: "Replies of the model", number: true, cell: (row) => short(row.turns) },
  { field: "sampled_tokens", head: "Sampled", title: "Tokens that the model sampled", number: true, cell: (row) => short(row.sampled_tokens) },
  { field: "trained_tokens", head: "Trained", title: "Tokens that a trainer learns from", number: true, cell: (row) => short(row.trained_tokens) },
  { field: "seconds", head: "Time", title: "From its start to its end", number: true, cell: (row) => seconds(row.seconds) },
  { field: "versions", head: "Version", title: "Policy versions", cell: (row) => <Known text={row.versions.join(", ") || null} /> },
  { field: "findings", head: "Findings", title: "What to know before training on it", cell: (row) => (
    <>{row.findings.map((kind) => <span class={`kind ${kind}`}>{kind}</span>)}</>) },
];
/** These are lists: there is no order of them. */
const UNSORTED = new Set<keyof Overview>(["versions", "findings", "advantage"]);

function Known({ text }: { text: string | null }): JSX.Element {
  return text === null ? <span class="muted">–</span> : <Name text={text} />;
}

export function ListView({ address, state }: { address: Address; state: State }): JSX.Element {
  const filter = { where: address.where ?? "", search: address.search ?? "" };
  const about = JSON.stringify(filter);
  const summary = useLoaded(() => source.summary(filter), `${about} ${revision(state)}`, about);
  const move = (change: Change) => go(changedBy(address, change));
  const changeWhere = source.embedded ? undefined : (where: string) => move({ where });
  return (
    <div class="list-view">
      <aside class="facets" aria-label="Overview">
        {summary.value && <Overviews summary={summary.value} address={address} filter={changeWhere} />}
      </aside>
      <section class="table-side">
        <h1 class="unseen">Trajectories</h1>
        <Filters address={address} state={state} move={move} error={summary.error} />
        <Table address={address} state={state} move={move} />
      </section>
    </div>
  );
}

interface Moving {
  address: Address;
  state: State;
  move(change: Change): void;
}

function Filters({ address, state, move, error }: Moving & { error: string | null }): JSX.Element {
  const search = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => search.current?.focus() });
  return (
    <div class="filters">
      {!source.embedded && (
        <form role="search" aria-label="Filter" onSubmit={(event) => event.preventDefault()}>
          <Box name="where" label="where" value={address.where ?? ""} set={(where) => move({ where })}
            placeholder={'reward < 0.5 and status == "error"'} invalid={error !== null}
            title={`Names: ${state.fields.join(", ")}`} />
        </form>
      )}
      <Box name="search" label="search" value={address.search ?? ""} set={(words) => move({ search: words })}
        placeholder="words of messages" field={search} invalid={false} title="Words of its messages (/)" />
      {error !== null && <p class="error" role="alert">{error}</p>}
    </div>
  );
}

interface BoxProps {
  name: string;
  label: string;
  value: string;
  set(value: string): void;
  placeholder: string;
  title: string;
  invalid: boolean;
  field?: { current: HTMLInputElement | null };
}

const TYPING_MILLIS = 350;

function Box({ name, label, value, set, placeholder, title, invalid, field }: BoxProps): JSX.Element {
  const [text, setText] = useState(value);
  const waiting = useRef(0);
  useEffect(() => setText(value), [value]);
  const later = (next: string) => {
    setText(next);
    clearTimeout(waiting.current);
    waiting.current = setTimeout(() => set(next.trim()), TYPING_MILLIS);
  };
  return (
    <label class={`box ${name}`}>
      <span>{label}</span>
      <input ref={field ?? null} name={name} value={text} placeholder={placeholder} title={title} spellcheck={false}
        autocomplete="off" aria-invalid={invalid}
        onInput={(event) => later(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key !== "Enter") return;
          clearTimeout(waiting.current);
          set(text.trim());
        }} />
      {text !== "" && (
        <button type="button" class="clear" aria-label={`Clear ${label}`} onClick={() => { setText(""); set(""); }}>×</button>
      )}
    </label>
  );
}

function Table({ address, state, move }: Moving): JSX.Element {
  const filter = { where: address.where ?? "", search: address.search ?? "" };
  const sort = address.sort ?? "";
  const size = Math.min(200, state.rowsLimit || 200);
  const pages = usePages(
    (offset, limit) => source.trajectories(filter, sort, offset, limit),
    JSON.stringify([filter, sort, revision(state)]),
    size,
  );
  const [at, setAt] = useState(0);
  const list = useRef<ListHandle>(null);
  const table = useRef<HTMLDivElement>(null);
  const total = pages.total ?? 0;
  const choose = (index: number) => {
    const next = Math.max(0, Math.min(total - 1, index));
    setAt(next);
    list.current?.show(next);
    // The focus may be on the link of another row.
    if (table.current?.contains(document.activeElement)) table.current.focus();
  };
  const open = () => {
    const row = pages.row(at);
    if (row) go({ trajectory: row.id });
  };
  useKeys({
    j: () => choose(at + 1), ArrowDown: () => choose(at + 1), PageDown: () => choose(at + 20),
    k: () => choose(at - 1), ArrowUp: () => choose(at - 1), PageUp: () => choose(at - 20),
    Enter: open, Home: () => choose(0), End: () => choose(total - 1),
  });
  useEffect(() => {
    if (at >= total && total > 0) setAt(total - 1);
  }, [total]);
  return (
    <div class="table" role="grid" aria-label="Trajectories" aria-rowcount={total + 1} aria-busy={pages.loading}
      tabIndex={0} ref={table}>
      <Heads sort={sort} set={(next) => move({ sort: next })} />
      {pages.total === 0 && (
        <p class="hint">{state.complete ? "No trajectory is like this." : "None so far: the sources are still being read."}</p>
      )}
      <VirtualList count={total} estimate={29} label="Rows" rows handle={list}
        onRange={(first, last) => pages.need(first, last)}
        render={(index) => <Row row={pages.row(index)} chosen={index === at} choose={() => setAt(index)} />} />
      <footer class="table-foot">
        {pages.total === null ? "reading…" : `${count(total)} of ${count(state.indexed)}`}
        {pages.error !== null && <span class="error" role="alert">{pages.error}</span>}
      </footer>
    </div>
  );
}

function Heads({ sort, set }: { sort: string; set(sort: string): void }): JSX.Element {
  const field = sort.replace(/^-/, "");
  const next = (column: Column) => {
    if (field !== column.field) return column.number ? `-${column.field}` : column.field;
    return sort.startsWith("-") ? column.field : `-${column.field}`;
  };
  return (
    <div class="row heads" role="row">
      {COLUMNS.map((column) => {
        const order = field !== column.field ? "none" : sort.startsWith("-") ? "descending" : "ascending";
        const mark = { none: "", descending: " ↓", ascending: " ↑" }[order];
        return (
          <span role="columnheader" class={`cell column-${column.field} ${column.number ? "number" : ""}`} title={column.title} aria-sort={order}>
            {UNSORTED.has(column.field) ? column.head : (
              <button type="button" onClick={() => set(next(column))}>{column.head}{mark}</button>
            )}
          </span>
        );
      })}
    </div>
  );
}

interface RowProps {
  row: Overview | undefined;
  chosen: boolean;
  choose(): void;
}

function Row({ row, chosen, choose }: RowProps): JSX.Element {
  if (!row) return <div class="row waiting" role="gridcell">…</div>;
  return (
    <div class={`row ${chosen ? "chosen" : ""}`} role="presentation">
      {COLUMNS.map((column, place) => (
        <span role="gridcell" class={`cell column-${column.field} ${column.number ? "number" : ""}`}>
          {place > 0 ? column.cell(row) : (
            <a class="open" href={formatAddress({ trajectory: row.id })} onFocus={choose}>{column.cell(row)}</a>
          )}
        </span>
      ))}
    </div>
  );
}
