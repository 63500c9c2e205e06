import { expect, test } from "vitest";
import type { Lesson, Showing } from "../../api/lessons";
import { sentence } from "./words";

const lesson = (changes: Partial<Lesson>): Lesson =>
  ({ state: "drawing", outcome: null, reason: "", updates: 0, showing: null, ...changes }) as Lesson;

const showing = { examples: 27, number: 20, time: 2, times: 4, loss: 1.234 };

test("a lesson that imitates examples says how far it is", () => {
  const said = (changes: Partial<Showing>) =>
    sentence(lesson({ state: "showing", updates: 4, showing: { ...showing, ...changes } }));
  expect(said({})).toContain("Imitating example 20 of 27, round 2 of 4; loss 1.23.");
  expect(said({ loss: null })).toContain("Imitating example 20 of 27, round 2 of 4.");
  expect(said({ examples: 0, number: 0 })).toContain("Drawing them…");
});

test("what has ended or is paused says why", () => {
  expect(sentence(lesson({ outcome: "failed", reason: "no judge" }))).toBe("Failed. no judge");
  expect(sentence(lesson({ state: "paused", reason: "asked" }))).toBe("Paused. Resume training to go on.");
  expect(sentence(lesson({ updates: 3 }))).toBe("Learning: each update is live at once.");
});
