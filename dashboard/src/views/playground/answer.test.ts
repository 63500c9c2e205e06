import { expect, test } from "vitest";
import type { ChatChunk } from "../../live/chat";
import { asked, messagesOf, textOf, withChunk } from "./answer";

const token = (text: string) => ({ token: text, logprob: -0.5, top_logprobs: [] });

function chunk(text: string, tokens: string[], more: Partial<ChatChunk> = {}, finish: string | null = null): ChatChunk {
  const logprobs = { content: tokens.map(token) };
  return { model: "tiny", choices: [{ delta: { content: text }, logprobs, finish_reason: finish }], ...more };
}

const answerOf = (...chunks: ChatChunk[]) => chunks.reduce(withChunk, asked("tone"));

test("a text has the tokens that it was made of, also those that came before it", () => {
  const answer = answerOf(chunk("a", ["a"]), chunk("", ["\ufffd"]), chunk("é", ["\ufffd"]));
  expect(answer.parts.map(({ text, tokens }) => [text, tokens.length])).toEqual([
    ["a", 1],
    ["é", 2],
  ]);
  expect(textOf(answer)).toBe("aé");
});

test("the token of the end has no text, and the last chunk says how it ended and what was collected", () => {
  const answer = answerOf(chunk("a", ["a"]), chunk("", ["<end>"], { trajectory_ids: ["t-1"] }, "stop"));
  expect(answer.parts.at(-1)).toMatchObject({ text: "", reasoning: false });
  expect(answer).toMatchObject({ state: "complete", trajectory: "t-1", by: "tiny" });
  expect(answerOf(chunk("a", ["a"], { lora_adapter: "tone@2" }, "length"))).toMatchObject({
    state: "cut off",
    by: "tone@2",
  });
  expect(answerOf(chunk("a", ["a"], {}, "repetition")).state).toBe("repeated");
});

test("reasoning is shown and not sent again", () => {
  const thinking = { ...chunk("", ["hm"]), choices: [{ ...choice, delta: { reasoning_content: "hm" } }] };
  const answer = answerOf(thinking, chunk("yes", ["yes"]));
  expect(answer.parts.map(({ reasoning }) => reasoning)).toEqual([true, false]);
  expect(textOf(answer)).toBe("yes");
});

const choice = { logprobs: { content: [token("hm")] }, finish_reason: null };

test("each side has its own history, and what failed is not in it", () => {
  const [one, two, none] = [answerOf(chunk("one", [])), answerOf(chunk("two", [])), asked("tone")];
  const turns = [
    { question: "a", answers: [one] },
    { question: "b", answers: [one, two] },
    { question: "c", answers: [one, none] },
  ];
  const said = (side: number) => messagesOf(" ", turns, side, "d").map(({ content }) => content);
  expect(said(0)).toEqual(["a", "one", "b", "one", "c", "one", "d"]);
  expect(said(1)).toEqual(["a", "one", "b", "two", "d"]);
  expect(messagesOf("Be brief.", [], 0, "d")[0]).toEqual({ role: "system", content: "Be brief." });
});
