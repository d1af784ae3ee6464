// An agent on the npm client of OpenAI: streamed, with tools, one answer a turn.
// Its argument is a list of questions; the address and the key come from the environment.
const { execFileSync } = require("node:child_process");
const { default: OpenAI } = require("openai");

const tools = [
  {
    type: "function",
    function: {
      name: "shell",
      description: "Run a shell command",
      parameters: { type: "object", properties: { command: { type: "string" } } },
    },
  },
];

async function said(client, messages) {
  const options = { model: "m", messages, tools, stream: true, temperature: 1.0 };
  const stream = await client.chat.completions.create(options);
  const message = { role: "assistant", content: "" };
  for await (const { choices } of stream) {
    const delta = choices[0]?.delta ?? {};
    message.content += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) {
      const calls = (message.tool_calls ??= []);
      const call = (calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      call.id ||= part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
    }
  }
  return message;
}

async function main() {
  const client = new OpenAI({ maxRetries: 0 });
  const messages = [{ role: "system", content: "You are helpful. Žluťoučký kůň 🐎" }];
  for (const question of JSON.parse(process.argv[2])) {
    messages.push({ role: "user", content: question });
    for (;;) {
      const message = await said(client, messages);
      messages.push(message);
      if (!message.tool_calls) break;
      for (const { id, function: call } of message.tool_calls) {
        const { command } = JSON.parse(call.arguments);
        const content = execFileSync("/bin/sh", ["-c", command], { encoding: "utf8" });
        messages.push({ role: "tool", tool_call_id: id, content });
      }
    }
    console.log(messages.at(-1).content);
  }
}

main();
