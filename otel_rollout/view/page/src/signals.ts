// What the colour of a token says. A value that is not known has a pattern of its own, never a colour.

import { short, signed } from "./text";
import type { Detail, RowView, TokenWindow } from "./types";

export interface Signal {
  name: string;
  title: string;
  /** What it says of the token at this place of a window. */
  of(window: TokenWindow, place: number, about: About): Reading;
  legend(about: About): { shade: string; text: string }[];
}

export interface About {
  detail: Detail;
  row: RowView;
}

export interface Reading {
  /** A class of the style sheet: see there. */
  shade: string;
  text: string;
}

const UNKNOWN: Reading = { shade: "unknown", text: "not known" };
const CONTEXT: Reading = { shade: "", text: "not sampled" };
const UNKNOWN_LEGEND = { shade: "unknown", text: "not known" };
const CONTEXT_LEGEND = { shade: "", text: "not sampled" };

/** Upper ends of the shades of surprisal and entropy, in nats. */
const NATS = [0.05, 0.2, 0.5, 1, 2, 3.5, 6];

function heat(nats: number): string {
  const step = NATS.findIndex((end) => nats <= end);
  return `heat-${step < 0 ? NATS.length : step}`;
}

const HEAT_LEGEND = [
  { shade: "heat-0", text: "≤ 0.05" },
  { shade: "heat-2", text: "0.5" },
  { shade: "heat-4", text: "2" },
  { shade: "heat-6", text: "6" },
  { shade: "heat-7", text: "more, nats" },
];

function versionsOf(detail: Detail): (string | number | null)[] {
  return [...new Set(detail.completions.map((call) => call.policyVersion))];
}

const VERSION_SHADES = 6;

function advantageShade(value: number): string {
  const step = Math.min(3, Math.ceil(Math.abs(value) / 0.5));
  return value === 0 ? "gain-0" : `${value > 0 ? "gain" : "loss"}-${step}`;
}

export const SIGNALS: Signal[] = [
  {
    name: "logprob",
    title: "Surprisal (−log-probability)",
    of(window, place) {
      if (!window.sampled[place]) return CONTEXT;
      const value = window.logprobs[place] ?? null;
      return value === null ? UNKNOWN : { shade: heat(-value), text: `${short(-value)} nats` };
    },
    legend: () => [...HEAT_LEGEND, UNKNOWN_LEGEND, CONTEXT_LEGEND],
  },
  {
    name: "mask",
    title: "Loss mask",
    of(window, place) {
      if (window.mask[place]) return { shade: "trained", text: "1: a trainer learns from it" };
      return { shade: "", text: window.sampled[place] ? "0: sampled, not trained here" : "0: context" };
    },
    legend: () => [
      { shade: "trained", text: "1: trains" },
      { shade: "", text: "0: context" },
    ],
  },
  {
    name: "sampled",
    title: "Sampled by the model",
    of(window, place) {
      if (!window.sampled[place]) return CONTEXT;
      return window.mask[place]
        ? { shade: "trained", text: "sampled, trains" }
        : { shade: "untrained", text: "sampled, does not train" };
    },
    legend: () => [
      { shade: "trained", text: "sampled, trains" },
      { shade: "untrained", text: "sampled, does not train" },
      CONTEXT_LEGEND,
    ],
  },
  {
    name: "advantage",
    title: "Advantage",
    of(window, place, { row }) {
      if (!window.mask[place]) return { shade: "", text: "does not train" };
      return row.advantage === null
        ? UNKNOWN
        : { shade: advantageShade(row.advantage), text: signed(row.advantage) };
    },
    legend: () => [
      { shade: "loss-3", text: "−1.5" },
      { shade: "loss-1", text: "−0.5" },
      { shade: "gain-0", text: "0" },
      { shade: "gain-1", text: "+0.5" },
      { shade: "gain-3", text: "+1.5" },
      UNKNOWN_LEGEND,
      { shade: "", text: "does not train" },
    ],
  },
  {
    name: "version",
    title: "Policy version",
    of(window, place, { detail }) {
      if (!window.sampled[place]) return CONTEXT;
      const call = window.completions[place] ?? null;
      const version = call === null ? null : (detail.completions[call]?.policyVersion ?? null);
      if (version === null) return UNKNOWN;
      const known = versionsOf(detail).filter((one) => one !== null);
      return { shade: `version-${known.indexOf(version) % VERSION_SHADES}`, text: String(version) };
    },
    legend: ({ detail }) => [
      ...versionsOf(detail)
        .filter((one) => one !== null)
        .slice(0, 12)
        .map((version, place) => ({ shade: `version-${place % VERSION_SHADES}`, text: String(version) })),
      UNKNOWN_LEGEND,
      CONTEXT_LEGEND,
    ],
  },
  {
    name: "entropy",
    title: "Entropy (of the alternatives that came)",
    of(window, place) {
      if (!window.sampled[place]) return CONTEXT;
      const value = window.entropy[place] ?? null;
      return value === null ? UNKNOWN : { shade: heat(value), text: `at least ${short(value)} nats` };
    },
    legend: () => [...HEAT_LEGEND, UNKNOWN_LEGEND, CONTEXT_LEGEND],
  },
];

export function signalNamed(name: string | undefined): Signal {
  return SIGNALS.find((one) => one.name === name) ?? (SIGNALS[0] as Signal);
}
