// LangChain.js: `node with_langchain.js BASE_URL ASKED PART…` prints one JSON object, an answer for each part.

import { OpenAIEmbeddings } from "@langchain/openai";

const [url, asked, ...wanted] = process.argv.slice(2);
const { model, texts } = JSON.parse(asked);

const parts = {
  // In one request, because its batches are of 512 texts.
  async vectors() {
    const configuration = { baseURL: url };
    const embeddings = new OpenAIEmbeddings({ model, apiKey: "none", maxRetries: 0, configuration });
    return await embeddings.embedDocuments(texts);
  },
};

const answers = {};
for (const part of wanted) answers[part] = await parts[part]();
console.log(JSON.stringify(answers));
