// Details: what a trajectory holds beside its messages, what people look for first.

import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";

import { Code } from "./markdown";
import { Status } from "./overview";
import { Name, Prose, between, count, seconds, short } from "./text";
import type { Shown } from "./trajectory";
import type { CompletionView, Detail, RewardView } from "./types";

export function RawView({ detail }: Shown): JSX.Element {
  const { overview, error, output, logs, warnings, rewards } = detail;
  return (
    <div class="raw page-column wide">
      {output !== null && output !== undefined && (
        <Section title="Output">
          <Code text={typeof output === "string" ? output : JSON.stringify(output, null, 2)} language="" />
        </Section>
      )}
      {logs.length > 0 && (
        <Section title="Logs">
          <Code text={logs.join("\n")} language="" />
        </Section>
      )}
      {error && (
        <Section title="Error">
          <p class="cause">
            <b>
              <Name text={error.type} />
            </b>{" "}
            <Prose text={error.message} />
          </p>
          {error.traceback !== undefined && <Code text={error.traceback} language="traceback" />}
        </Section>
      )}
      {rewards.length > 0 && (
        <Section title="Rewards">
          <Rewards rewards={rewards} />
        </Section>
      )}
      <Pairs title="Metrics" pairs={overview.metrics} />
      <Pairs title="Metadata" pairs={overview.metadata} />
      {warnings.length > 0 && (
        <Section title="Warnings">
          <ul>
            {warnings.map((one) => (
              <li>
                <Prose text={one} />
              </li>
            ))}
          </ul>
        </Section>
      )}
      <Section title="Calls">
        <Calls detail={detail} />
      </Section>
      <Section title="Overview">
        <Code text={JSON.stringify(overview, null, 2)} language="json" />
      </Section>
    </div>
  );
}

function Section({ title, children }: { title: string; children: ComponentChildren }): JSX.Element {
  return (
    <section>
      <h2>{title}</h2>
      {children}
    </section>
  );
}

function Pairs({ title, pairs }: { title: string; pairs: Record<string, unknown> }): JSX.Element {
  const entries = Object.entries(pairs);
  if (entries.length === 0) return <></>;
  return (
    <Section title={title}>
      <table class="plain-table">
        <tbody>
          {entries.map(([name, value]) => (
            <tr>
              <th scope="row">
                <Name text={name} />
              </th>
              <td>
                {typeof value === "number" ? (
                  short(value)
                ) : (
                  <Prose text={typeof value === "string" ? value : JSON.stringify(value)} />
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Section>
  );
}

function Rewards({ rewards }: { rewards: RewardView[] }): JSX.Element {
  return (
    <table class="plain-table">
      <thead>
        <tr>
          <th>name</th>
          <th class="number">value</th>
          <th class="number">weight</th>
          <th>label</th>
          <th>of</th>
          <th>explanation</th>
        </tr>
      </thead>
      <tbody>
        {rewards.map((one) => (
          <tr>
            <td>{one.name === null ? <span class="muted">–</span> : <Name text={one.name} />}</td>
            <td class="number">
              <b>{short(one.value)}</b>
            </td>
            <td class="number">{short(one.weight)}</td>
            <td>{one.label !== null && <Name text={one.label} />}</td>
            <td>{one.completion_id === null ? "the trajectory" : <Name text={one.completion_id} />}</td>
            <td>{one.explanation !== null && <Prose text={one.explanation} />}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const CALLS = 100;

function Calls({ detail }: { detail: Detail }): JSX.Element {
  const [shown, setShown] = useState(CALLS);
  const first = detail.completions[0]?.start ?? 0;
  return (
    <>
      {detail.completions.slice(0, shown).map((call, place) => (
        <Call call={call} place={place} first={first} />
      ))}
      {detail.completions.length > shown && (
        <button type="button" class="link more" onClick={() => setShown(shown + CALLS)}>
          show more: {count(shown)} of {count(detail.completions.length)} are shown
        </button>
      )}
    </>
  );
}

function Call({ call, place, first }: { call: CompletionView; place: number; first: number }): JSX.Element {
  const [open, setOpen] = useState(false);
  return (
    <details class="raw-call" onToggle={(event) => setOpen((event.currentTarget as HTMLDetailsElement).open)}>
      <summary>
        <span class="place">{place}</span>
        <span class="raw-path">
          <Name text={call.path} />
        </span>
        <span>
          <Name text={call.requestModel ?? call.model ?? "–"} />
        </span>
        <Status value={call.status} />
        <span class="number">
          {short(call.promptTokens)} + {short(call.sampledTokens)} tokens
        </span>
        <span class="number">
          +{seconds(between(first, call.start))}, {seconds(between(call.start, call.end))}
        </span>
      </summary>
      {open && <Code text={JSON.stringify(call, null, 2)} language="json" />}
    </details>
  );
}
