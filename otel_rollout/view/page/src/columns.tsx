// The columns of the list.

import type { JSX } from "preact";

import { Status } from "./overview";
import { Name, seconds, short, shortId, signed, tokens } from "./text";
import type { Overview } from "./types";

export interface Column {
  field: keyof Overview;
  head: string;
  title: string;
  number?: boolean;
  cell(row: Overview): JSX.Element | string;
}

export const COLUMNS: Column[] = [
  {
    field: "name",
    head: "Trajectory",
    title: "Name, and the beginning of its id",
    cell: (row) => (
      <>
        <Name text={row.name} />{" "}
        <span class="id">
          <Name text={row.id.slice(0, 8)} title={row.id} />
        </span>
      </>
    ),
  },
  { field: "task_id", head: "Task", title: "Task", cell: (row) => <Known text={row.task_id} /> },
  {
    field: "group_id",
    head: "Group",
    title: "Group",
    cell: (row) =>
      row.group_id === null ? (
        <Known text={null} />
      ) : (
        <Name text={shortId(row.group_id)} title={row.group_id} />
      ),
  },
  {
    field: "sample_index",
    head: "#",
    title: "Sample of its group",
    number: true,
    cell: (row) => short(row.sample_index),
  },
  { field: "status", head: "Status", title: "How it ended", cell: (row) => <Status value={row.status} /> },
  {
    field: "reward",
    head: "Reward",
    title: "Reward",
    number: true,
    cell: (row) => <b>{short(row.reward)}</b>,
  },
  {
    field: "advantage",
    head: "Adv.",
    title: "Advantage in its group",
    number: true,
    cell: (row) => signed(row.advantage),
  },
  {
    field: "turns",
    head: "Turns",
    title: "Replies of the model",
    number: true,
    cell: (row) => short(row.turns),
  },
  {
    field: "prompt_tokens",
    head: "Prompt",
    title: "Tokens of the prompts of all calls",
    number: true,
    cell: (row) => tokens(row.prompt_tokens),
  },
  {
    field: "sampled_tokens",
    head: "Sampled",
    title: "Tokens that the model sampled",
    number: true,
    cell: (row) => tokens(row.sampled_tokens),
  },
  {
    field: "trained_tokens",
    head: "Trained",
    title: "Tokens that a trainer learns from",
    number: true,
    cell: (row) => tokens(row.trained_tokens),
  },
  {
    field: "seconds",
    head: "Time",
    title: "From its start to its end",
    number: true,
    cell: (row) => seconds(row.seconds),
  },
  {
    field: "versions",
    head: "Version",
    title: "Policy versions",
    cell: (row) => <Known text={row.versions.join(", ") || null} />,
  },
  {
    field: "findings",
    head: "Findings",
    title: "What to know before training on it",
    cell: (row) => (
      <>
        {row.findings.map((kind) => (
          <span class={`kind ${kind}`}>{kind}</span>
        ))}
      </>
    ),
  },
];
/** These are lists: there is no order of them. */
export const UNSORTED = new Set<keyof Overview>(["versions", "findings"]);

function Known({ text }: { text: string | null }): JSX.Element {
  return text === null ? <span class="muted">–</span> : <Name text={text} />;
}
