// An agent on Vercel's AI SDK, on the provider that its first argument names: streamed, with tools.
// Its second argument is a list of questions; the addresses and keys come from the environment.
const { execFileSync } = require("node:child_process");
const { stepCountIs, streamText, tool, jsonSchema } = require("ai");

const shell = tool({
  description: "Run a shell command",
  inputSchema: jsonSchema({ type: "object", properties: { command: { type: "string" } } }),
  execute: async ({ command }) => execFileSync("/bin/sh", ["-c", command], { encoding: "utf8" }),
});

async function main() {
  const [provider, questions] = process.argv.slice(2);
  const model = require(`@ai-sdk/${provider}`)[provider]("m");
  const messages = [];
  for (const content of JSON.parse(questions)) {
    messages.push({ role: "user", content });
    const system = "You are helpful. Žluťoučký kůň 🐎";
    const options = { tools: { shell }, stopWhen: stepCountIs(9), maxRetries: 0 };
    const result = streamText({ model, system, messages, ...options });
    console.log(await result.text);
    messages.push(...(await result.response).messages);
  }
}

main();
