// No regular expression of the page may have two repeats side by side that match the same
// characters: messages are texts of models and tools, and none of them may stop the tab.

import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";

import { analyse } from "scslre";
import { parseAst } from "vite";

/** What is wrong with the regular expressions of a module. */
function slow(text, name) {
  const found = [];
  const say = (node, why) => found.push(`${name}: ${text.slice(node.start, node.end)}: ${why}`);
  const visit = (node) => {
    if (node === null || typeof node !== "object") return;
    if (node.regex) {
      const { reports } = analyse({ source: node.regex.pattern, flags: node.regex.flags });
      for (const { type } of reports) say(node, `repeats that overlap (${type})`);
    } else if (
      node.callee?.name === "RegExp" &&
      /[*+{]/.test(text.slice(node.start, node.end).replaceAll("${", ""))
    ) {
      say(node, "a pattern that is put together may not repeat");
    }
    for (const each of Object.values(node)) visit(each);
  };
  visit(parseAst(text, { lang: name.endsWith("x") ? "tsx" : "ts" }));
  return found;
}

for (const [pattern, isSlow] of [
  ["/(?:[ \\t]*[-+*>][ \\t]*){20}/", true],
  ["/(a+)+b/", true],
  ["/^a*a*$/", true],
  ["new RegExp(`[${a}]+`)", true],
  ["/(?:[-+*>][ \\t]*){20}/", false],
]) {
  if (slow(pattern, "a test").length > 0 !== isSlow) throw new Error(`judged wrongly: ${pattern}`);
}
const files = readdirSync("src").filter((name) => /\.tsx?$/.test(name));
const found = files.flatMap((name) => slow(readFileSync(join("src", name), "utf8"), name));
if (found.length > 0) throw new Error(found.join("\n"));
