// The first view: all trajectories, in charts and as a table that can be sorted and filtered.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { type Address, type Change, changedBy, formatAddress, go } from "./address";
import { COLUMNS, type Column, UNSORTED } from "./columns";
import { Filters, type Moving } from "./filters";
import { useKeys, useLoaded, usePages } from "./hooks";
import { Overviews } from "./overview";
import { revision, source } from "./source";
import { Prose, beginning, count, ending, plain } from "./text";
import type { Overview, State } from "./types";
import { asCommands } from "./where";
import { type ListHandle, VirtualList } from "./virtual";

export function ListView({ address, state }: { address: Address; state: State }): JSX.Element {
  const filter = { where: address.where ?? "", search: address.search ?? "" };
  const about = JSON.stringify(filter);
  const summary = useLoaded(() => source.summary(filter), `${about} ${revision(state)}`, about);
  const move = (change: Change) => go(changedBy(address, change));
  const changeWhere = source.embedded ? undefined : (where: string) => move({ where });
  const [charts, showCharts] = useState(false);
  return (
    <div class={`list-view ${charts ? "with-charts" : ""}`}>
      <aside class="facets" aria-label="Overview">
        {summary.value?.total === 0 && <p class="nothing">Nothing is listed.</p>}
        {!!summary.value?.total && (
          <Overviews summary={summary.value} address={address} filter={changeWhere} />
        )}
      </aside>
      <section class="table-side">
        <h1 class="unseen">Trajectories</h1>
        <Filters address={address} state={state} move={move} error={summary.error}>
          <button
            type="button"
            class="to-charts"
            aria-pressed={charts}
            onClick={() => showCharts((was) => !was)}
          >
            Charts
          </button>
        </Filters>
        <Table address={address} state={state} move={move} summaryError={summary.error} />
      </section>
    </div>
  );
}

function Table({
  address,
  state,
  move,
  summaryError,
}: Moving & { summaryError: string | null }): JSX.Element {
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
  const total = pages.error === null ? (pages.total ?? 0) : 0;
  const choose = (index: number) => {
    const next = Math.max(0, Math.min(total - 1, index));
    setAt(next);
    list.current?.show(next);
    // The focus may be on the link of another row.
    if (table.current?.contains(document.activeElement)) table.current.focus();
  };
  const open = () => {
    const row = pages.row(at);
    if (row) go(placeOf(row));
  };
  useKeys({
    j: () => choose(at + 1),
    ArrowDown: () => choose(at + 1),
    PageDown: () => choose(at + 20),
    k: () => choose(at - 1),
    ArrowUp: () => choose(at - 1),
    PageUp: () => choose(at - 20),
    Enter: open,
    Home: () => choose(0),
    End: () => choose(total - 1),
  });
  useEffect(() => {
    if (at >= total && total > 0) setAt(total - 1);
  }, [total]);
  return (
    <div
      class="table"
      role="grid"
      aria-label="Trajectories"
      aria-rowcount={total + 1}
      aria-busy={pages.loading}
      tabIndex={0}
      ref={table}
    >
      <Heads sort={sort} set={(next) => move({ sort: next })} />
      {(pages.total === 0 || pages.error !== null) && (
        <p class="hint">
          {pages.error !== null
            ? pages.error !== summaryError && <span class="error">{pages.error} </span>
            : state.complete
              ? "No trajectory matches. "
              : "None so far: the sources are still being read. "}
          {(filter.where || filter.search) && (
            <button type="button" class="link" onClick={() => move({ where: "", search: "" })}>
              Clear the filter
            </button>
          )}
        </p>
      )}
      <VirtualList
        count={total}
        estimate={68}
        label="Rows"
        rows
        handle={list}
        onRange={(first, last) => pages.need(first, last)}
        render={(index) => <Row row={pages.row(index)} chosen={index === at} choose={() => setAt(index)} />}
      />
      <footer class="table-foot">
        {pages.error === null &&
          (pages.total === null ? "reading…" : `${count(total)} of ${count(state.indexed)}`)}
        {!source.embedded && (filter.where !== "" || filter.search !== "") && pages.error === null && (
          <details class="as-commands">
            <summary>the filter as commands</summary>
            <pre>{plainLines(asCommands(state.sources, [state.where, filter.where], filter.search))}</pre>
            {filter.search !== "" && <p>`export` has no search.</p>}
          </details>
        )}
      </footer>
    </div>
  );
}

/** The trajectory, and in it what was found. */
function placeOf({ id, hit }: Overview): Address {
  const found = hit?.[1] ?? "";
  return found ? { trajectory: id, search: found } : { trajectory: id };
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
          <span
            role="columnheader"
            class={`cell column-${column.field} ${column.number ? "number" : ""}`}
            title={column.title}
            aria-sort={order}
          >
            {UNSORTED.has(column.field) ? (
              column.head
            ) : (
              <button type="button" onClick={() => set(next(column))}>
                {column.head}
                {mark}
              </button>
            )}
          </span>
        );
      })}
    </div>
  );
}

/** Characters of the task, and of the end, below a row. */
const ROW_TEXT = 300;

const plainLines = (text: string) => text.split("\n").map(plain).join("\n");

/** The text around what is searched for, which is at the odd places. */
function Hit({ pieces }: { pieces: string[] }): JSX.Element {
  return (
    <span role="gridcell" class="row-text hit" title={plain(pieces.join(""))}>
      {pieces.map((text, place) => (place % 2 ? <mark>{plain(text)}</mark> : <Prose text={text} />))}
    </span>
  );
}

interface RowProps {
  row: Overview | undefined;
  chosen: boolean;
  choose(): void;
}

function Row({ row, chosen, choose }: RowProps): JSX.Element {
  if (!row)
    return (
      <div class="row waiting" role="gridcell">
        …
      </div>
    );
  const failed = row.error !== null || row.error_type !== null;
  return (
    <div class={`row ${chosen ? "chosen" : ""}`} role="presentation">
      {COLUMNS.map((column, place) => (
        <span role="gridcell" class={`cell column-${column.field} ${column.number ? "number" : ""}`}>
          {place > 0 ? (
            column.cell(row)
          ) : (
            <a class="open" href={formatAddress(placeOf(row))} onFocus={choose}>
              {column.cell(row)}
            </a>
          )}
        </span>
      ))}
      <span role="gridcell" class="row-text muted" title={plain(row.question ?? "")}>
        <Prose text={beginning(row.question ?? "No message of a user", ROW_TEXT)} />
      </span>
      {row.hit && <Hit pieces={row.hit} />}
      <span role="gridcell" class={`row-text ${failed ? "bad" : ""}`} title={plain(ending(row))}>
        <Prose text={beginning(ending(row) || "No reply", ROW_TEXT)} />
      </span>
    </div>
  );
}
