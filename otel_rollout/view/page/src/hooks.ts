// State that several views share: what is loaded, what keys do, which colours.

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

export interface Loaded<T> {
  value: T | null;
  error: string | null;
  loading: boolean;
}

/**
 * What `load` answers, asked anew when `key` changes. While a new answer is under way the old one
 * stays, unless `fresh` changed: then it was about something else.
 */
export function useLoaded<T>(load: () => Promise<T>, key: string, fresh: string = key): Loaded<T> {
  const [state, set] = useState<Loaded<T> & { fresh: string }>({ ...EMPTY, fresh });
  const latest = useRef(0);
  useEffect(() => {
    const mine = ++latest.current;
    const done = (part: Partial<Loaded<T>>) => {
      if (latest.current === mine) set((was) => ({ ...was, error: null, ...part, loading: false, fresh }));
    };
    set((was) => (was.fresh === fresh ? { ...was, loading: true } : { ...EMPTY, fresh }));
    load().then(
      (value) => done({ value }),
      (error: unknown) => done({ error: messageOf(error) }),
    );
    return () => void (latest.current += Number(latest.current === mine));
  }, [key, fresh]);
  return state.fresh === fresh ? state : EMPTY;
}

const EMPTY = { value: null, error: null, loading: true };

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

export interface Pages<T> {
  total: number | null;
  error: string | null;
  loading: boolean;
  row(index: number): T | undefined;
  /** Load what these rows need. */
  need(first: number, last: number): void;
}

/** A long list, asked for a page at a time. A new `key` asks anew and shows the old rows meanwhile. */
export function usePages<T>(
  fetchPage: (offset: number, limit: number) => Promise<{ total: number; rows: T[] }>,
  key: string,
  size: number,
): Pages<T> {
  const [, redraw] = useState(0);
  const store = useRef({ key: "", pages: new Map<number, T[]>(), asked: new Set<number>() });
  const shown = useRef({ pages: new Map<number, T[]>(), total: null as number | null });
  const error = useRef<string | null>(null);
  if (store.current.key !== key) store.current = { key, pages: new Map(), asked: new Set() };
  const mine = store.current;

  const ask = (page: number) => {
    if (mine.asked.has(page)) return;
    mine.asked.add(page);
    const done = (change: () => void) => {
      if (store.current !== mine) return;
      change();
      redraw((n) => n + 1);
    };
    fetchPage(page * size, size).then(
      ({ total, rows }) =>
        done(() => {
          mine.pages.set(page, rows);
          shown.current = { pages: mine.pages, total };
          error.current = null;
        }),
      (reason: unknown) => done(() => (error.current = messageOf(reason))),
    );
  };
  useEffect(() => ask(0), [key]);
  const current = shown.current.pages === mine.pages;
  return {
    total: shown.current.total,
    error: error.current,
    loading: !current && error.current === null,
    row: (index) => shown.current.pages.get(Math.floor(index / size))?.[index % size],
    need: (first, last) => {
      for (let page = Math.floor(first / size); page <= Math.floor(last / size); page++) ask(page);
    },
  };
}

type Keys = Record<string, (event: KeyboardEvent) => void>;
const stack: { keys: { current: Keys }; level: number }[] = [];

const WRITTEN_IN = "input:not([type=checkbox]), textarea, select";
/** These have an Enter of their own. */
const PRESSED = "a, button, summary, [role=button]";

function isIn(target: EventTarget | null, selector: string): boolean {
  return target instanceof Element && target.closest(selector) !== null;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.key === "Enter" && isIn(event.target, PRESSED)) return;
  if (isIn(event.target, WRITTEN_IN)) {
    if (event.key === "Escape") (event.target as HTMLElement).blur();
    return;
  }
  for (let at = stack.length - 1; at >= 0; at--) {
    const action = stack[at]?.keys.current[event.key];
    if (action) {
      event.preventDefault();
      return action(event);
    }
  }
});

/** What keys do while this is shown. Of several that know a key, the highest level has it. */
export function useKeys(keys: Keys, level = 1): void {
  const held = useRef(keys);
  held.current = keys;
  useEffect(() => {
    const entry = { keys: held, level };
    stack.push(entry);
    stack.sort((a, b) => a.level - b.level);
    return () => void stack.splice(stack.indexOf(entry), 1);
  }, []);
}

export type Theme = "light" | "dark";
const THEME = "otel-rollout-theme";

function storedTheme(): Theme | null {
  try {
    const value = localStorage.getItem(THEME);
    return value === "light" || value === "dark" ? value : null;
  } catch {
    return null; // Storage may be forbidden; then the choice lasts as long as the page.
  }
}

/** The colours in use, and how to change them; at first those of the system. */
export function useTheme(): [Theme, () => void] {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [theme, set] = useState<Theme>(storedTheme() ?? (dark.matches ? "dark" : "light"));
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
  }, [theme]);
  useEffect(() => {
    const follow = () => storedTheme() === null && set(dark.matches ? "dark" : "light");
    dark.addEventListener("change", follow);
    return () => dark.removeEventListener("change", follow);
  }, []);
  const toggle = useCallback(() => {
    set((was) => {
      const next = was === "dark" ? "light" : "dark";
      try {
        localStorage.setItem(THEME, next);
      } catch {
        // As above.
      }
      return next;
    });
  }, []);
  return [theme, toggle];
}

/** The width of an element in pixels, as it is now. */
export function useWidth(): [{ current: HTMLDivElement | null }, number] {
  const box = useRef<HTMLDivElement>(null);
  const [width, set] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => set(Math.round(entry?.contentRect.width ?? 0)));
    if (box.current) observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return [box, width];
}
