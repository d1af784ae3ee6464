// A long list of which only what can be seen is in the document.

import {
  Virtualizer,
  elementScroll,
  measureElement,
  observeElementOffset,
  observeElementRect,
} from "@tanstack/virtual-core";
import type { ComponentChildren, JSX, Ref } from "preact";
import { useImperativeHandle, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

export interface ListHandle {
  show(index: number, align?: "start" | "center" | "auto"): void;
}

interface Props {
  count: number;
  /** Height of a row in pixels, before it was drawn. */
  estimate: number;
  render(index: number): ComponentChildren;
  label: string;
  /** Rows of a table, after one with the heads; else items of a list. */
  rows?: boolean;
  overscan?: number;
  class?: string;
  handle?: Ref<ListHandle>;
  /** Drawn above the rows, and scrolled with them. */
  header?: ComponentChildren;
  /** True where nothing in the rows takes the focus. */
  focusable?: boolean;
  onRange?(first: number, last: number): void;
}

/** The rows with these places. Those that were drawn before stay as they are, so that scrolling is cheap. */
function useDrawn(render: Props["render"], places: number[]): Map<number, ComponentChildren> {
  const last = useRef({ render, rows: new Map<number, ComponentChildren>() });
  const known = last.current.render === render ? last.current.rows : new Map<number, ComponentChildren>();
  const rows = new Map(places.map((place) => [place, known.has(place) ? known.get(place) : render(place)]));
  last.current = { render, rows };
  return rows;
}

type Scroller = Virtualizer<HTMLDivElement, Element>;

export function VirtualList(props: Props): JSX.Element {
  const [, redraw] = useState(0);
  const box = useRef<HTMLDivElement>(null);
  const inner = useRef<HTMLDivElement>(null);
  const options = {
    count: props.count,
    getScrollElement: () => box.current,
    estimateSize: () => props.estimate,
    overscan: props.overscan ?? 8,
    scrollMargin: inner.current?.offsetTop ?? 0,
    observeElementRect,
    observeElementOffset,
    measureElement,
    scrollToFn: elementScroll,
    onChange: () => redraw((n) => n + 1),
  };
  const scroller = useMemo<Scroller>(() => new Virtualizer(options), []);
  scroller.setOptions(options);
  useLayoutEffect(() => scroller._didMount(), []);
  useLayoutEffect(() => scroller._willUpdate());
  useImperativeHandle(
    props.handle ?? null,
    () => ({
      show: (index, align = "auto") => scroller.scrollToIndex(index, { align }),
    }),
    [],
  );
  const items = scroller.getVirtualItems();
  const [first, last] = [items[0], items.at(-1)];
  useLayoutEffect(() => {
    if (first && last) props.onRange?.(first.index, last.index);
  }, [first?.index, last?.index, props.count]);
  const drawn = useDrawn(
    props.render,
    items.map((item) => item.index),
  );
  const offset = (first?.start ?? 0) - options.scrollMargin;
  return (
    <div class={`virtual ${props.class ?? ""}`} ref={box} {...(props.focusable ? { tabIndex: 0 } : {})}>
      {props.header}
      <div ref={inner} class="virtual-space" style={{ height: `${scroller.getTotalSize()}px` }}>
        <div
          class="virtual-rows"
          role={props.rows ? "rowgroup" : "list"}
          aria-label={props.label}
          style={{ transform: `translateY(${Math.max(0, offset)}px)` }}
        >
          {items.map((item) => (
            <div
              key={item.key}
              class="virtual-row"
              data-index={item.index}
              ref={scroller.measureElement}
              {...(props.rows ? { role: "row", "aria-rowindex": item.index + 2 } : { role: "listitem" })}
            >
              {drawn.get(item.index)}
            </div>
          ))}
        </div>
      </div>
    </div>
  );
}
