// Where the reader is: the part of the address after `#`, which can be shared.

import { useEffect, useState } from "preact/hooks";

export const VIEWS = ["messages", "tokens", "findings", "time", "raw"] as const;
export type View = (typeof VIEWS)[number];

export interface Address {
  where?: string;
  search?: string;
  sort?: string;
  /** The curves, and what they are by. */
  curve?: string;
  /** The least reward of a pass. */
  pass?: string;
  /** "only": rates are of what has a reward; else a failure has not passed. */
  scored?: string;
  group?: string;
  /** Two ids. */
  diff?: [string, string];
  trajectory?: string;
  view?: View;
  history?: number;
  node?: number;
  row?: number;
  token?: number;
  signal?: string;
}

/** What is different elsewhere; undefined leaves it out. */
export type Change = { [Name in keyof Address]?: Address[Name] | undefined };

/** An address with a change made to it. */
export function changedBy(address: Address, change: Change): Address {
  const entries = Object.entries({ ...address, ...change });
  return Object.fromEntries(entries.filter(([, value]) => value !== undefined && value !== ""));
}

const NUMBERS = ["history", "node", "row", "token"] as const;
const TEXTS = [
  "where",
  "search",
  "sort",
  "curve",
  "pass",
  "scored",
  "group",
  "trajectory",
  "signal",
] as const;

/** The address that this text names; what it does not know is left out. */
export function parseAddress(hash: string): Address {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const address: Address = {};
  for (const name of TEXTS) {
    const value = words.get(name);
    if (value) address[name] = value;
  }
  for (const name of NUMBERS) {
    const value = words.get(name);
    if (value !== null && /^\d{1,12}$/.test(value)) address[name] = Number(value);
  }
  const view = VIEWS.find((known) => known === words.get("view"));
  if (view) address.view = view;
  const [a, b] = (words.get("diff") ?? "").split(",");
  if (a && b) address.diff = [decode(a), decode(b)];
  return address;
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** `#...` for an address. Ids of a diff are encoded once more: they may have commas. */
export function formatAddress(address: Address): string {
  const words: string[] = [];
  const add = (name: string, value: string) =>
    words.push(`${name}=${encodeURIComponent(value).replaceAll("%20", "+")}`);
  for (const name of ["where", "search", "sort", "curve", "pass", "scored", "group"] as const) {
    if (address[name]) add(name, address[name]);
  }
  if (address.diff) {
    words.push(`diff=${address.diff.map((id) => encodeURIComponent(encodeURIComponent(id))).join(",")}`);
  }
  if (address.trajectory) add("trajectory", address.trajectory);
  if (address.view) add("view", address.view);
  for (const name of NUMBERS) {
    if (address[name] !== undefined) add(name, String(address[name]));
  }
  if (address.signal) add("signal", address.signal);
  return `#${words.join("&")}`;
}

let current: Address = parseAddress(location.hash);
const listeners = new Set<() => void>();

function changed(address: Address): void {
  current = address;
  for (const listener of listeners) listener();
}

addEventListener("popstate", () => changed(parseAddress(location.hash)));
addEventListener("hashchange", () => changed(parseAddress(location.hash)));

// Links inside the page, also where it is in a frame whose relative addresses are its parent's.
addEventListener("click", (event) => {
  const plain = event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  const link = event.target instanceof Element ? event.target.closest("a[href^='#']") : null;
  if (!link || !plain || event.defaultPrevented) return;
  event.preventDefault();
  go(parseAddress(link.getAttribute("href") ?? ""));
});

/** Go to an address. `replace`: without a further step for the browser's way back. */
export function go(address: Address, how: "push" | "replace" = "push"): void {
  const hash = formatAddress(address);
  try {
    if (how === "push") history.pushState(null, "", hash);
    else history.replaceState(null, "", hash);
  } catch {
    // A frame without an address of its own, as in a notebook: the page goes there all the same.
  }
  changed(address);
}

export function currentAddress(): Address {
  return current;
}

export function useAddress(): Address {
  const [address, set] = useState(current);
  useEffect(() => {
    const listener = () => set(current);
    listeners.add(listener);
    listener();
    return () => void listeners.delete(listener);
  }, []);
  return address;
}
