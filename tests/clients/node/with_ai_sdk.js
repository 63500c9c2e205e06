// Vercel's AI SDK: `node with_ai_sdk.js BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, asked, ...wanted] = process.argv.slice(2);
const { model, question, max_tokens, tool: weather } = JSON.parse(asked);
const provider = createOpenAICompatible({ name: "parallm", baseURL: url, supportsStructuredOutputs: true, includeUsage: true });
const said = { model: provider(model), prompt: question, maxOutputTokens: max_tokens, temperature: 0, maxRetries: 0 };
const longer = { ...said, maxOutputTokens: 128 };
const Capital = z.object({ city: z.enum(["Paris", "London", "Rome"]), certain: z.boolean() });
const tokens = (usage) => [usage.inputTokens, usage.outputTokens];

const parts = {
  async chat() {
    const { text, usage } = await generateText(said);
    return { text, usage: tokens(usage) };
  },

  async stream() {
    const { text, usage } = streamText(said);
    return { text: await text, usage: tokens(await usage) };
  },

  async parsed() {
    return (await generateObject({ ...longer, schema: Capital })).object;
  },

  async parsed_stream() {
    const { object, partialObjectStream } = streamObject({ ...longer, schema: Capital });
    for await (const _ of partialObjectStream);
    return await object;
  },

  // The tool runs in this process. The stream must bring its arguments in pieces.
  async tool_call() {
    const ran = [];
    const execute = async (given) => ran.push(given);
    const tools = { [weather.name]: tool({ description: weather.description, inputSchema: jsonSchema(weather.parameters), execute }) };
    const call = { ...longer, tools, toolChoice: "required", stopWhen: stepCountIs(1), providerOptions: { parallm: { parallel_tool_calls: false } } };
    const whole = await generateText(call);
    const pieces = [];
    for await (const part of streamText(call).fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "tool-input-delta") pieces.push(part.delta);
    }
    const calls = whole.toolCalls.map(({ toolName, input }) => ({ name: toolName, arguments: input }));
    const streamed = [{ name: calls[0].name, arguments: JSON.parse(pieces.join("")) }];
    return { calls, streamed, ran, pieces: pieces.length, reason: whole.finishReason };
  },
};

const answers = {};
for (const part of wanted) answers[part] = await parts[part]();
console.log(JSON.stringify(answers));
