/** Fields of requests, as the page calls them. */
export const LABELS = {
  "reward.word": "Word or phrase",
  "reward.pattern": "Regular expression",
  "reward.judge": "What a good answer is",
  max_tokens: "Longest answer, in tokens",
  lora_adapter: "Adapter that learns",
  lora_name: "Name",
  lora_path: "Folder",
  checkpoint_name: "Name",
} as const;

const NAMES = new RegExp(`\\b(${Object.keys(LABELS).join("|").replaceAll(".", "\\.")})\\b`, "g");

/** A sentence of the server with the page's names of fields in place of the API's. */
export const inWords = (message: string): string =>
  message
    .replace(/\bprompts\[(\d+)\]/g, (_, order) => `Prompt ${Number(order) + 1}`)
    .replace(NAMES, (name) => LABELS[name as keyof typeof LABELS]);
