// openai-node: `node with_openai.js BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, asked, ...wanted] = process.argv.slice(2);
const { model, question, prompt, max_tokens, tool } = JSON.parse(asked);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const said = { model, messages: [{ role: "user", content: question }], max_tokens, temperature: 0 };
const longer = { ...said, max_tokens: 128 };
const Capital = z.object({ city: z.enum(["Paris", "London", "Rome"]), certain: z.boolean() });

const tokens = (usage) => [usage.prompt_tokens, usage.completion_tokens];
const named = ({ function: call }) => ({ name: call.name, arguments: JSON.parse(call.arguments) });

const parts = {
  async chat() {
    const answer = await client.chat.completions.create(said);
    return { text: answer.choices[0].message.content, usage: tokens(answer.usage) };
  },

  async stream() {
    let [text, usage] = ["", null];
    const options = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create({ ...said, ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    return { text, usage: tokens(usage) };
  },

  async completion() {
    const answer = await client.completions.create({ model, prompt, max_tokens, temperature: 0 });
    return answer.choices[0].text;
  },

  async parsed() {
    const format = { response_format: zodResponseFormat(Capital, "capital") };
    return (await client.chat.completions.parse({ ...longer, ...format })).choices[0].message.parsed;
  },

  async tool_call() {
    const tools = [{ type: "function", function: tool }];
    const asked = { ...longer, tools, tool_choice: "required", parallel_tool_calls: false };
    const whole = (await client.chat.completions.create(asked)).choices[0].message;
    const streamed = await client.chat.completions.stream(asked).finalMessage();
    return { calls: whole.tool_calls.map(named), streamed: streamed.tool_calls.map(named) };
  },
};

const answers = {};
for (const part of wanted) answers[part] = await parts[part]();
console.log(JSON.stringify(answers));
