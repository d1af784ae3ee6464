// JSON text as people read it: laid out anew, each number as it was written.

const TOKENS = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g;
const LONGEST = 200_000;

/** The text on lines of their own, where it is JSON; else as it is. */
export function pretty(text: string): string {
  if (!/^\s*[[{]/.test(text) || text.length > LONGEST) return text;
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let [laid, depth, before] = ["", 0, ""];
  for (const token of text.match(TOKENS) ?? []) {
    const closes = token === "}" || token === "]";
    if (closes) depth--;
    const isEmpty = closes && (before === "{" || before === "[");
    if (before !== "" && !isEmpty && (closes || /^[{[,]$/.test(before))) laid += `\n${"  ".repeat(depth)}`;
    if (token === "{" || token === "[") depth++;
    laid += token.startsWith('"') ? readable(token) : token === ":" ? ": " : token;
    before = token;
  }
  return laid;
}

/** A JSON string without escapes that it does not need. */
function readable(token: string): string {
  return token.includes("\\u") ? JSON.stringify(JSON.parse(token)) : token;
}
