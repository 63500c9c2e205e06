// Ollama's JavaScript client: `node with_ollama.js BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

import { Ollama } from "ollama";

const [url, asked, ...wanted] = process.argv.slice(2);
const { model, question, max_tokens } = JSON.parse(asked);
const client = new Ollama({ host: url.replace(/\/v1$/, "") });
const options = { temperature: 0, num_predict: max_tokens };
const said = { model, messages: [{ role: "user", content: question }], options };
const text = "A cat sleeps.";

const parts = {
  async chat() {
    return (await client.chat(said)).message.content;
  },

  async stream() {
    let text = "";
    for await (const part of await client.chat({ ...said, stream: true })) text += part.message.content;
    return text;
  },

  // By the older route, whose vectors keep their length.
  async embeddings() {
    return (await client.embeddings({ model, prompt: text })).embedding;
  },

  async embed() {
    return (await client.embed({ model, input: text })).embeddings[0];
  },
};

const answers = {};
for (const part of wanted) answers[part] = await parts[part]();
console.log(JSON.stringify(answers));
