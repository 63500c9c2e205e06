import { expect, test } from "vitest";
import { describe, lookOf } from "./tint";

const token = (logprob: number | null, advantage: number | null) => ({ text: "a\n", logprob, advantage });

test("advantages are tinted by sign and size, and the largest most strongly", () => {
  const looks = [2, 1, 0.01, 0, -1, -2, null].map((advantage) => lookOf(token(null, advantage), "advantage", 2));
  expect(looks).toEqual(["more more-4", "more more-2", "more more-1", "", "less less-2", "less less-4", ""]);
});

test("the rarer a token was, the stronger its tint", () => {
  const looks = [1, 0.9, 0.6, 0.2, 0.02, 0.001].map((p) => lookOf(token(Math.log(p), null), "logprob", 0));
  expect(looks).toEqual(["", "", "rare-1", "rare-2", "rare-3", "rare-4"]);
  expect(lookOf(token(null, null), "logprob", 0)).toBe("");
});

test("a token that was not drawn has no tint", () => {
  expect(lookOf({ ...token(-9, 1), context: true }, "advantage", 1)).toBe("context");
});

test("figures have their signs, and what is not known is left out", () => {
  expect(describe(token(Math.log(0.5), -0.5))).toBe("“a⏎” · log-probability −0.69 (50 %) · advantage −0.5");
  expect(describe(token(null, null))).toBe("“a⏎”");
});
