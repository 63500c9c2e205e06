import { expect, test } from "vitest";
import { inWords } from "./fields";

test("a refusal has the names of the page, and not those of the API", () => {
  expect(inWords("reward.pattern: is no regular expression: missing ), at position 0")).toBe(
    "Regular expression: is no regular expression: missing ), at position 0",
  );
  expect(inWords("prompts[0] and max_tokens are 9000 tokens, and this model's context is 8192.")).toBe(
    "Prompt 1 and Longest answer, in tokens are 9000 tokens, and this model's context is 8192.",
  );
  expect(inWords("lora_path: '/x' is no directory")).toBe("Folder: '/x' is no directory");
});
