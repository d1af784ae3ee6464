// The frame around the views: header, state of the server, colours, keys.

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import {
  type Address,
  changedBy,
  currentAddress,
  formatAddress,
  go,
  parseAddress,
  useAddress,
} from "./address";
import { CurvesView } from "./curves";
import { DiffView } from "./diff";
import { GroupView } from "./group";
import { Help } from "./help";
import { messageOf, useKeys, useTheme } from "./hooks";
import { ListView } from "./list";
import { source } from "./source";
import { Name, count, shortId } from "./text";
import { TrajectoryView } from "./trajectory";
import type { State } from "./types";

const POLL_MILLIS = 2000;
/** Nothing has changed for so long: ask less often. */
const QUIET_POLLS = 30;
const QUIET_FACTOR = 5;

/** The server's state, asked again and again: a file may grow. */
function useServerState(id: string): [State | null, string | null] {
  const [state, set] = useState<State | null>(null);
  const [error, setError] = useState<string | null>(null);
  const open = useRef(id);
  open.current = id;
  useEffect(() => {
    let [timer, quiet, last] = [0, 0, ""];
    const ask = async () => {
      try {
        const answer = await source.state(open.current);
        const text = JSON.stringify(answer);
        quiet = text === last ? quiet + 1 : 0;
        if (text !== last) set(answer);
        last = text;
        setError(null);
      } catch (reason) {
        quiet++;
        setError(messageOf(reason));
      }
      const wait = POLL_MILLIS * (quiet > QUIET_POLLS ? QUIET_FACTOR : 1);
      if (!source.embedded) timer = setTimeout(() => void ask(), wait);
    };
    void ask();
    return () => clearTimeout(timer);
  }, []);
  return [state, error];
}

/** The list as it was last filtered: where the way back leads. */
let lastList: Address = {};

function isList(address: Address): boolean {
  return !address.trajectory && !address.group && !address.diff && !address.curve;
}

function isCurve(address: Address): boolean {
  return address.curve !== undefined && !address.trajectory && !address.group && !address.diff;
}

export function App(): JSX.Element {
  const address = useAddress();
  const [state, error] = useServerState(address.trajectory ?? "");
  const [theme, toggleTheme] = useTheme();
  const [help, setHelp] = useState(false);
  if (isList(address)) lastList = address;
  else if (isCurve(address)) lastList = changedBy(address, { curve: undefined, pass: undefined });
  useKeys(
    {
      g: () => go(lastList),
      "?": () => setHelp(true),
      Escape: () => !isList(currentAddress()) && go(lastList),
    },
    0,
  );
  useEffect(() => void openTheStart(), []);
  useEffect(() => {
    document.title = titleOf(address);
  }, [address]);
  return (
    <>
      <button type="button" class="skip" onClick={() => document.getElementById("main")?.focus()}>
        Skip to the content
      </button>
      <header class="top">
        <a class="brand" href={formatAddress(isList(address) ? {} : lastList)}>
          otel_rollout
        </a>
        <Crumbs address={address} />
        <Live state={state} error={error} />
        <button
          type="button"
          class="quiet"
          onClick={toggleTheme}
          aria-label="Light or dark colours"
          aria-pressed={theme === "dark"}
        >
          {theme === "dark" ? "☾" : "☀"}
        </button>
        <button type="button" class="quiet" onClick={() => setHelp(true)} aria-label="Keys">
          ?
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        {state ? <Content address={address} state={state} /> : <p class="hint">{error ?? "Reading…"}</p>}
      </main>
      {help && <Help close={() => setHelp(false)} />}
    </>
  );
}

/** A page that holds its answers begins where it says, or with its only trajectory. */
async function openTheStart(): Promise<void> {
  if (!source.embedded || formatAddress(currentAddress()) !== "#") return;
  if (source.start) return go(parseAddress(source.start), "replace");
  const { total, rows } = await source.trajectories({ where: "", search: "" }, "", 0, 2);
  if (total === 1 && rows[0]) go({ trajectory: rows[0].id }, "replace");
}

function titleOf(address: Address): string {
  if (address.trajectory) return `${address.trajectory.slice(0, 8)} · trajectory`;
  if (address.group) return `${shortId(address.group)} · group`;
  if (address.curve) return "Curves";
  return address.diff ? "Difference" : "Trajectories";
}

function Content({ address, state }: { address: Address; state: State }): JSX.Element {
  if (address.trajectory) return <TrajectoryView address={address} state={state} key={address.trajectory} />;
  if (address.group) return <GroupView id={address.group} state={state} key={address.group} />;
  if (address.diff) return <DiffView ids={address.diff} key={address.diff.join()} />;
  if (address.curve) return <CurvesView address={address} by={address.curve} state={state} />;
  return <ListView address={address} state={state} />;
}

function Crumbs({ address }: { address: Address }): JSX.Element {
  return (
    <nav class="crumbs" aria-label="Where you are">
      <a href={formatAddress(lastList)}>Trajectories</a>
      {address.group && (
        <span>
          Group <Name text={shortId(address.group)} title={address.group} />
        </span>
      )}
      {address.diff && <span>Difference</span>}
      {isCurve(address) && <span>Curves</span>}
      {address.trajectory && (
        <span>
          <Name text={address.trajectory.slice(0, 12)} title={address.trajectory} />
        </span>
      )}
    </nav>
  );
}

function Live({ state, error }: { state: State | null; error: string | null }): JSX.Element {
  if (error !== null)
    return (
      <span class="state bad" role="status">
        {error}
      </span>
    );
  if (!state) return <span class="state" role="status" />;
  const problems = state.errors.length > 0 && (
    <details class="problems">
      <summary>
        {count(state.errors.length)} problem{state.errors.length > 1 && "s"}
      </summary>
      <ul>
        {state.errors.map((text) => (
          <li>
            <Name text={text} />
          </li>
        ))}
      </ul>
    </details>
  );
  return (
    <span class="state" role="status" title={state.sources.join("\n")}>
      {problems}
      {!state.complete && <span class="reading" aria-hidden="true" />}
      {source.embedded
        ? `${count(state.indexed)} in this page`
        : `${count(state.indexed)} ${state.complete ? "read" : "read so far"}`}
    </span>
  );
}
