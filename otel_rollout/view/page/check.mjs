// The built page: small enough, and safe to be put into one file.

import { readFileSync } from "node:fs";
import { join } from "node:path";

const folder = process.env.OTEL_ROLLOUT_PAGE ?? "built";
const script = readFileSync(join(folder, "assets/app.js"), "utf8");
const MOST = 300_000;

if (Buffer.byteLength(script) > MOST) {
  throw new Error(`assets/app.js has ${Buffer.byteLength(script)} bytes, at most ${MOST} are allowed`);
}
for (const word of ["<script", "</script", "eval(", "new Function"]) {
  if (script.includes(word)) throw new Error(`assets/app.js has ${JSON.stringify(word)}`);
}
console.log(`assets/app.js: ${Buffer.byteLength(script)} bytes`);
