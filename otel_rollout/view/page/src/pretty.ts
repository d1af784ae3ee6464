// JSON text as people read it: laid out anew, or as the arguments of a call; each number as it was written.

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

/** An object's members as a call has them, `query="x", limit=3`; null for other texts, and for members on
 * several lines or with members of their own. */
export function inBrackets(text: string): string | null {
  if (text.trim() === "") return "";
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  const tokens = text.match(TOKENS) ?? [];
  if (tokens[0] !== "{" || (tokens.length > 2 && tokens.length % 4 !== 1)) return null;
  const pairs: string[] = [];
  for (let at = 1; at + 2 < tokens.length; at += 4) {
    const [name, value] = [JSON.parse(tokens[at] ?? '""') as string, tokens[at + 2] ?? ""];
    if (!/^\w+$/.test(name) || /^[{[]|\\n/.test(value)) return null;
    pairs.push(`${name}=${value.startsWith('"') ? readable(value) : value}`);
  }
  return pairs.join(", ");
}
