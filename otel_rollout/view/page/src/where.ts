// Filter expressions that clicks write: clauses joined with `and`.

export function quote(value: string | number): string {
  return typeof value === "number" ? String(value) : JSON.stringify(value);
}

/** What a bin of a histogram holds. The last bin includes its end. */
export function binClause(field: string, from: number, to: number, last: boolean): string {
  if (from === to) return `${field} == ${from}`;
  return `${field} >= ${from} and ${field} ${last ? "<=" : "<"} ${to}`;
}

/** A word of a shell command. */
function shellWord(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, "'\\''")}'`;
}

/** Commands for the terminal that are about the same trajectories, one a line. */
export function asCommands(sources: string[], clauses: string[], search: string): string {
  const given = clauses.map((clause) => clause.trim()).filter((clause) => clause !== "");
  const where = given.length > 1 ? given.map((clause) => `(${clause})`).join(" and ") : (given[0] ?? "");
  const rest = [...sources.map(shellWord), ...(where ? ["--where", shellWord(where)] : [])].join(" ");
  const words = search ? ` --search ${shellWord(search)}` : "";
  return `otel-rollout list ${rest}${words}\notel-rollout export ${rest} --to tokens -o rows.jsonl`;
}

export function hasClause(where: string, clause: string): boolean {
  return ` and ${where} and `.includes(` and ${clause} and `);
}

/** The expression with this clause, or without it if it has it already. */
export function toggled(where: string, clause: string): string {
  if (hasClause(where, clause)) {
    return ` and ${where} and `.replace(` and ${clause} and `, " and ").slice(5, -5);
  }
  if (where.trim() === "") return clause;
  const open = /\bor\b|\bif\b/.test(where) && !where.startsWith("(");
  return `${open ? `(${where})` : where} and ${clause}`;
}
