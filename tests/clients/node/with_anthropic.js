// Anthropic's SDK: `node with_anthropic.js BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, asked, ...wanted] = process.argv.slice(2);
const { model, question, max_tokens, tool } = JSON.parse(asked);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const said = { model, max_tokens, temperature: 0 };

const told = ({ content: [block], usage }) => ({
  text: block.text,
  usage: [usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens, usage.output_tokens],
});
const roles = (messages) => messages.map(({ role }) => role);

const parts = {
  // Three turns, of which each gives only what is new, and the last is streamed; then the same without a thread.
  async thread() {
    const thread = client.beta.messages.thread(said);
    await thread.send({ role: "user", content: "My name is Bob." });
    await thread.send({ role: "user", content: question });
    const last = await thread.stream({ role: "user", content: "What is my name?" }).finalMessage();
    const messages = thread.messages.slice(0, -1);
    return { said: roles(messages), last: told(last), whole: told(await client.messages.create({ ...said, messages })) };
  },

  // Two rounds of a tool that has to be called, each with its result.
  async tool_runner() {
    const ran = [];
    const { name, description, parameters: inputSchema } = tool;
    const run = (call) => ran.push(call) && "rain, 12 degrees";
    const runner = client.beta.messages.toolRunner({
      ...said,
      max_tokens: 128,
      max_iterations: 2,
      messages: [{ role: "user", content: question }],
      tool_choice: { type: "any", disable_parallel_tool_use: true },
      tools: [betaTool({ name, description, inputSchema, run })],
    });
    const calls = [];
    for await (const { content } of runner) calls.push(...content.map(({ input }) => input));
    return { ran, calls, said: roles(runner.params.messages) };
  },
};

const answers = {};
for (const part of wanted) answers[part] = await parts[part]();
console.log(JSON.stringify(answers));
