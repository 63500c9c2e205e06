import { expect, test } from "vitest";
import { failed, messages, succeeded, toast } from "./toast";

const texts = () => messages.value.map(({ text }) => text);

test("a success takes back what was said of failures before it", () => {
  failed(new Error("reward.pattern: no regular expression"));
  expect(texts()).toEqual(["Regular expression: no regular expression"]);
  toast("Saved.");
  expect(texts()).toEqual(["Saved."]);
  failed(new Error("no"));
  expect(texts()).toEqual(["Saved.", "no"]);
  succeeded();
  expect(texts()).toEqual(["Saved."]);
});
