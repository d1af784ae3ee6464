// Every token of a row, coloured by a signal.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { useKeys } from "./hooks";
import { SIGNALS, signalNamed } from "./signals";
import { Name, count } from "./text";
import { TokenFacts } from "./token_facts";
import { LINE, Line } from "./token_line";
import { Legend, MiniMap } from "./token_map";
import type { Shown } from "./trajectory";
import type { RowView } from "./types";
import { type ListHandle, VirtualList } from "./virtual";
import { useTokens } from "./windows";

export function TokensView(shown: Shown): JSX.Element {
  const { detail, address } = shown;
  const [first] = mainFirst(detail.rows);
  const row = address.row === undefined ? first : (detail.rows[address.row] ?? first);
  if (!row) {
    return (
      <div class="hint">
        <p>No token ids came with this trajectory.</p>
        <button type="button" class="link" onClick={() => shown.move({ view: "findings" })}>
          Why does this not train?
        </button>
      </div>
    );
  }
  return <Row {...shown} row={row} key={`${row.row} ${detail.changed}`} />;
}

function Row(shown: Shown & { row: RowView }): JSX.Element {
  const { detail, address, move, row } = shown;
  const tokens = useTokens(detail.overview.id, row.row);
  const signal = signalNamed(address.signal);
  const chosen = Math.min(address.token ?? firstSampled(row), row.length - 1);
  const [hovered, setHovered] = useState<number | null>(null);
  const [range, setRange] = useState<[number, number]>([0, 0]);
  const list = useRef<ListHandle>(null);
  const jump = useRef<HTMLInputElement>(null);
  const choose = (position: number, show = true) => {
    const next = Math.max(0, Math.min(row.length - 1, position));
    setHovered(null);
    move({ row: row.row, token: next }, "replace");
    if (show) list.current?.show(Math.floor(next / LINE));
  };
  const span = (by: 1 | -1) => {
    const starts = row.spans.map((one) => one.start);
    const next =
      by > 0 ? starts.find((start) => start > chosen) : starts.filter((start) => start < chosen).at(-1);
    if (next !== undefined) {
      choose(next, false);
      list.current?.show(Math.floor(next / LINE), "center");
    }
  };
  useEffect(() => {
    tokens.need(chosen, chosen);
    list.current?.show(Math.floor(chosen / LINE), "center");
  }, [row.row]);
  useEffect(() => tokens.need(chosen, chosen), [chosen]);
  const there = tokens.block(chosen) !== undefined;
  useEffect(() => {
    // Lines have their height only now.
    if (there) list.current?.show(Math.floor(chosen / LINE), "center");
  }, [there, row.row]);
  useKeys({
    n: () => span(1),
    p: () => span(-1),
    t: () => jump.current?.focus(),
    ArrowRight: () => choose(chosen + 1),
    ArrowLeft: () => choose(chosen - 1),
    j: () => choose(chosen + LINE),
    ArrowDown: () => choose(chosen + LINE),
    k: () => choose(chosen - LINE),
    ArrowUp: () => choose(chosen - LINE),
    Home: () => choose(0),
    End: () => choose(row.length - 1),
  });
  const about = { detail, row };
  const seen = (first: number, last: number) => {
    tokens.need(first * LINE, Math.min(row.length, (last + 1) * LINE) - 1);
    setRange([first * LINE, (last + 1) * LINE]);
  };
  // The same until something of it changes, so that a pointer that moves draws no token anew.
  const lines = useMemo(
    () => (
      <VirtualList
        count={Math.ceil(row.length / LINE)}
        estimate={88}
        label="Lines of tokens"
        handle={list}
        overscan={4}
        focusable
        onRange={seen}
        render={(line) => (
          <Line
            line={line}
            length={row.length}
            tokens={tokens}
            signal={signal}
            about={about}
            chosen={Math.floor(chosen / LINE) === line ? chosen : -1}
          />
        )}
      />
    ),
    [detail, row, signal, chosen, tokens.loaded],
  );
  return (
    <div class="tokens-view">
      <div class="toolbar">
        <RowMenu {...shown} />
        <label class="menu">
          colour
          <select
            name="signal"
            value={signal.name}
            onChange={(event) => move({ signal: event.currentTarget.value })}
          >
            {SIGNALS.map((one) => (
              <option value={one.name}>{one.title}</option>
            ))}
          </select>
        </label>
        <form
          class="jump"
          onSubmit={(event) => {
            event.preventDefault();
            choose(Number(jump.current?.value) || 0);
          }}
        >
          <label class="box">
            <span>token</span>
            <input
              ref={jump}
              name="token"
              inputMode="numeric"
              value={chosen}
              size={7}
              aria-label="Go to token"
            />
          </label>
        </form>
        <button type="button" onClick={() => span(-1)} aria-label="Previous sampled span (p)" title="p">
          ← sampled
        </button>
        <button type="button" onClick={() => span(1)} aria-label="Next sampled span (n)" title="n">
          sampled →
        </button>
        <span class="spread" />
        <Numbers row={row} />
      </div>
      <Legend signal={signal} about={about} />
      <MiniMap
        row={row}
        range={range}
        choose={(position) => {
          choose(position, false);
          list.current?.show(Math.floor(position / LINE), "center");
        }}
      />
      {tokens.error !== null && (
        <p class="error" role="alert">
          {tokens.error}
        </p>
      )}
      {detail.tokenizer !== null && tokens.block(chosen)?.texts.includes(null) && (
        <p class="hint-line">
          Servers send no texts of prompt tokens. Restart with{" "}
          <code>
            otel-rollout view … --tokenizer <Name text={detail.tokenizer} />
          </code>{" "}
          to see them.
        </p>
      )}
      <div class="tokens-body">
        <div
          class="tokens"
          role="group"
          aria-label="Tokens"
          onMouseOver={(event) => setHovered(positionOf(event.target))}
          onMouseLeave={() => setHovered(null)}
          onClick={(event) => {
            const at = positionOf(event.target);
            if (at !== null) choose(at, false);
          }}
        >
          {lines}
        </div>
        <TokenFacts
          {...shown}
          row={row}
          window={tokens.block(hovered ?? chosen)}
          position={hovered ?? chosen}
        />
      </div>
    </div>
  );
}

/** The rows in order of their histories: those of the main conversation come first. */
function mainFirst(rows: RowView[]): RowView[] {
  const place = (row: RowView) => row.history ?? Number.MAX_SAFE_INTEGER;
  return [...rows].sort((a, b) => place(a) - place(b) || a.row - b.row);
}

function firstSampled(row: RowView): number {
  return row.spans[0]?.start ?? 0;
}

function positionOf(target: EventTarget | null): number | null {
  const place =
    target instanceof Element ? target.closest<HTMLElement>("[data-token]")?.dataset.token : undefined;
  return place === undefined ? null : Number(place);
}

function RowMenu({ detail, row, move }: Shown & { row: RowView }): JSX.Element {
  if (detail.rows.length < 2) return <></>;
  return (
    <label class="menu">
      row
      <select
        name="row"
        value={row.row}
        onChange={(event) => move({ row: Number(event.currentTarget.value), token: undefined })}
      >
        {mainFirst(detail.rows).map((one) => (
          <option value={one.row}>
            {one.history === null
              ? "no history"
              : `history ${one.history + 1} ${detail.histories[one.history]?.relation ?? ""}`}
            {` · row ${one.row} · ${count(one.length)} tokens`}
            {one.trained === 0 && " · does not train"}
          </option>
        ))}
      </select>
    </label>
  );
}

function Numbers({ row }: { row: RowView }): JSX.Element {
  return (
    <span class="numbers">
      <b>{count(row.length)}</b> tokens · <b>{count(row.promptLength)}</b> first prompt ·{" "}
      <b>{count(row.sampled)}</b> sampled · <b>{count(row.trained)}</b> train
      {row.truncated && <span class="tag warn">truncated</span>}
    </span>
  );
}
