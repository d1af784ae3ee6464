// Filter expressions that clicks write: clauses joined with `and`.

export function quote(value: string | number): string {
  return typeof value === "number" ? String(value) : JSON.stringify(value);
}

/** What a bin of a histogram holds. The last bin includes its end. */
export function binClause(field: string, from: number, to: number, last: boolean): string {
  if (from === to) return `${field} == ${from}`;
  return `${field} >= ${from} and ${field} ${last ? "<=" : "<"} ${to}`;
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
