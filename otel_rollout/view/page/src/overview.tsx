// All trajectories in charts: what they were rewarded with, how they ended, what does not train.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { Address } from "./address";
import { formatAddress } from "./address";
import { Bar, Histogram } from "./charts";
import { messageOf } from "./hooks";
import { source } from "./source";
import { Name, count, many, plain, seconds, short, shortId, tokenSum } from "./text";
import type { FindingCount, GroupCount, Scored, Summary } from "./types";
import { binClause, hasClause, quote, toggled } from "./where";

const MORE_GROUPS = 200;

interface Props {
  summary: Summary;
  address: Address;
  /** Filters with this expression; missing where nothing can filter. */
  filter: ((where: string) => void) | undefined;
}

export function Overviews({ summary, address, filter }: Props): JSX.Element {
  const where = address.where ?? "";
  const act = (clause: string) => filter && (() => filter(toggled(where, clause)));
  const bins = (field: string) => ({
    choose:
      filter &&
      ((bin: { from: number; to: number }, last: boolean) =>
        filter(toggled(where, binClause(field, bin.from, bin.to, last)))),
    chosen: (bin: { from: number; to: number }, last: boolean) =>
      hasClause(where, binClause(field, bin.from, bin.to, last)),
  });
  const most = (list: { count: number }[]) => Math.max(1, ...list.map((one) => one.count));
  const { rewards, tokens } = summary;
  return (
    <>
      <Panel title="Reward" note={rewards.mean === null ? "" : `mean ${short(rewards.mean)}`}>
        <Histogram bins={rewards.bins} label="Reward" tall {...bins("reward")} />
        {rewards.missing > 0 && (
          <Bar
            label="No reward"
            value={rewards.missing}
            most={summary.total}
            kind="warn"
            chosen={hasClause(where, "reward is None")}
            choose={act("reward is None")}
          />
        )}
      </Panel>
      <Panel title="Endings">
        {summary.statuses.map((one) => (
          <Bar
            key={one.value}
            label={<Status value={one.value} />}
            value={one.count}
            most={most(summary.statuses)}
            kind={one.value === "complete" ? "" : "bad"}
            chosen={hasClause(where, `status == ${quote(one.value)}`)}
            choose={act(`status == ${quote(one.value)}`)}
          />
        ))}
        {summary.terminationReasons
          .filter((one) => one.value !== null)
          .map((one) => (
            <Bar
              key={one.value}
              label={<Name text={one.value ?? ""} />}
              note="reason"
              value={one.count}
              most={most(summary.statuses)}
              chosen={hasClause(where, reasonClause(one.value))}
              choose={act(reasonClause(one.value))}
            />
          ))}
      </Panel>
      {summary.errors.length > 0 && (
        <Panel title="Errors" note="trajectories">
          {summary.errors.map((one) => (
            <Bar
              key={one.value}
              label={<Name text={`${one.value}: ${one.text}`} />}
              value={one.count}
              most={most(summary.errors)}
              kind="bad"
              chosen={hasClause(where, `error_type == ${quote(one.value)}`)}
              choose={act(`error_type == ${quote(one.value)}`)}
            />
          ))}
        </Panel>
      )}
      {summary.names.length > 1 && (
        <Facet
          title="Agent"
          counts={summary.names}
          where={where}
          act={act}
          clause={(value) => `name == ${quote(value)}`}
        />
      )}
      {summary.metadata.map(({ key, values }) => (
        <Facet
          title={plain(key)}
          counts={values}
          label={(value) => (value.startsWith('"') ? String(JSON.parse(value)) : value)}
          where={where}
          act={act}
          clause={(value) => `metadata[${quote(key)}] == ${METADATA[value] ?? value}`}
        />
      ))}
      <Panel title="Findings" note={summary.findings.length ? "trajectories" : "none"}>
        {summary.findings.map((one) => (
          <details class="finding-count" key={one.text}>
            <summary>
              <span class={`kind ${one.kind}`}>{one.kind}</span>
              <span class="bar-label">{one.text}</span>
              <span class="bar-count" title={found(one)}>
                {count(one.count)}
                {one.replies > 0 && ` (${count(one.replies)})`}
              </span>
            </summary>
            <p>{one.advice || "No advice is known."}</p>
            {filter && (
              <button type="button" class="link" onClick={act(`${quote(one.kind)} in findings`)}>
                {hasClause(where, `${quote(one.kind)} in findings`)
                  ? "show all again"
                  : `show those with “${one.kind}”`}
              </button>
            )}
          </details>
        ))}
      </Panel>
      <Panel title="Policy versions" note={summary.versions.length ? undefined : "none"}>
        {summary.versions.map((one) => (
          <ScoredBar
            one={one}
            most={most(summary.versions)}
            name={one.value === null ? "none" : String(one.value)}
            chosen={hasClause(where, versionClause(one.value))}
            choose={one.value === null ? undefined : act(versionClause(one.value))}
          />
        ))}
      </Panel>
      <Panel title="Groups" note={summary.groupsTotal ? count(summary.groupsTotal) : "none"}>
        <Groups first={summary.groups} total={summary.groupsTotal} address={address} />
      </Panel>
      <Panel title="Tokens">
        <h4>Prompt: {tokenSum(tokens.prompt_tokens, tokens.prompt_tokens_known, summary.total)}</h4>
        <Histogram bins={summary.promptTokens.bins} label="Prompt tokens" {...bins("prompt_tokens")} />
        <h4>Sampled: {tokenSum(tokens.sampled_tokens, tokens.sampled_tokens_known, summary.total)}</h4>
        <Histogram bins={summary.sampledTokens.bins} label="Sampled tokens" {...bins("sampled_tokens")} />
      </Panel>
      <Panel title="Length and duration">
        <h4>Turns</h4>
        <Histogram bins={summary.turns.bins} label="Turns" {...bins("turns")} />
        <h4>Duration</h4>
        <Histogram bins={summary.seconds.bins} label="Duration" format={seconds} {...bins("seconds")} />
      </Panel>
    </>
  );
}

/** What a filter says in place of a value of metadata. */
const METADATA: Record<string, string> = { true: "1", false: "0" };
const FACET = 12;

interface FacetProps {
  title: string;
  counts: { value: string; count: number }[];
  label?: (value: string) => string;
  where: string;
  act(clause: string): (() => void) | undefined;
  clause(value: string): string;
}

/** The most frequent values of a field, each of which filters. */
function Facet({ title, counts, label, where, act, clause }: FacetProps): JSX.Element {
  return (
    <Panel title={title} note={counts.length > FACET ? `${FACET} of ${count(counts.length)}` : undefined}>
      {counts.slice(0, FACET).map(({ value, count: size }) => (
        <Bar
          key={value}
          label={<Name text={label ? label(value) : value} />}
          value={size}
          most={Math.max(...counts.map((one) => one.count))}
          chosen={hasClause(where, clause(value))}
          choose={act(clause(value))}
        />
      ))}
    </Panel>
  );
}

const found = (one: FindingCount) =>
  many(one.count, "trajectory") + (one.replies > 0 ? `, ${many(one.replies, "reply")}` : "");
const reasonClause = (value: string | null) => `termination_reason == ${quote(value ?? "")}`;
const versionClause = (value: string | number | null) => `${quote(value ?? "")} in versions`;

function Panel(props: {
  title: string;
  note?: string | undefined;
  children: ComponentChildren;
}): JSX.Element {
  return (
    <section class="panel">
      <header>
        <h3>{props.title}</h3>
        {props.note && <span class="muted">{props.note}</span>}
      </header>
      {props.children}
    </section>
  );
}

interface ScoredBarProps {
  one: Scored;
  name: string;
  most: number;
  chosen: boolean;
  choose: (() => void) | undefined;
}

function ScoredBar({ one, name, most, chosen, choose }: ScoredBarProps): JSX.Element {
  return (
    <Bar
      label={<Name text={name} />}
      value={one.count}
      most={most}
      chosen={chosen}
      choose={choose}
      note={<Mean one={one} />}
    />
  );
}

function Mean({ one }: { one: Scored }): JSX.Element {
  const title = `${one.scored} of ${one.count} have a reward, ${one.failed} failed`;
  return (
    <span title={title}>
      {one.failed > 0 && <span class="bad">{count(one.failed)} failed · </span>}
      {one.mean === null ? "no reward" : short(one.mean)}
    </span>
  );
}

/** The task of a group, and the group where that says more. */
function nameOf({ value, task }: GroupCount): string {
  if (task === null || task === value) return shortId(value);
  return shortId(value) === value ? value : `${task} · ${shortId(value)}`;
}

interface GroupsProps {
  first: Summary["groups"];
  total: number;
  address: Address;
}

/** The largest groups, and more of them at each click. */
function Groups({ first, total, address }: GroupsProps): JSX.Element {
  const [more, setMore] = useState<GroupCount[]>([]);
  const [error, setError] = useState<string | null>(null);
  useEffect(() => setMore([]), [first]);
  const groups = [...first.filter((one) => one.value !== null), ...more];
  const most = Math.max(1, ...groups.map((one) => one.count));
  const filter = { where: address.where ?? "", search: address.search ?? "" };
  const load = () =>
    source.groups(filter, groups.length, MORE_GROUPS).then(
      ({ rows }) => setMore([...more, ...rows]),
      (reason: unknown) => setError(messageOf(reason)),
    );
  return (
    <div class="groups">
      {groups.map((one) => (
        <a class="count" key={one.value} href={formatAddress({ group: one.value ?? "" })}>
          <span class="bar-label">
            <Name text={nameOf(one)} title={one.value} />
          </span>
          <span class="bar-note">
            <Mean one={one} />
          </span>
          <span class="bar-count">{count(one.count)}</span>
          <svg class="share" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">
            <rect width={(one.count / most) * 100} height="1" />
          </svg>
        </a>
      ))}
      {total > groups.length && !source.embedded && (
        <button type="button" class="link more" onClick={() => void load()}>
          show more of {count(total)}
        </button>
      )}
      {error !== null && (
        <p class="error" role="alert">
          {error}
        </p>
      )}
    </div>
  );
}

export function Status({ value }: { value: string }): JSX.Element {
  const kind = value === "complete" ? "good" : value === "running" ? "live" : "bad";
  return (
    <span class={`status ${kind}`}>
      <Name text={value} />
    </span>
  );
}
