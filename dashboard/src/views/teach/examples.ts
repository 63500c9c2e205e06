/** Lessons that the bundled model learns in some minutes; `benchmarks/studies/lessons.py` measures them. */

import { asked, type NewLesson, type Rule, type RuleKind } from "../../api/lessons";
import { LABELS } from "../../components/fields";

export interface Example {
  title: string;
  lesson: NewLesson;
}

export const EXAMPLES: readonly [Example, ...Example[]] = [
  {
    title: "Say banana",
    lesson: {
      prompts: ["Tell me about cats.", "What should I eat tonight?", "Write one sentence about the sea."].map(asked),
      reward: { word: "banana" },
      max_tokens: 48,
    },
  },
  {
    title: "Ask back",
    lesson: {
      prompts: ["I feel tired today.", "I bought a new bicycle.", "My dog is called Max."].map(asked),
      reward: { pattern: "\\?\\s*\\Z" },
      max_tokens: 48,
    },
  },
];

/** A lesson of which nothing is written yet. */
export const EMPTY: NewLesson = { prompts: [asked("")], reward: { word: "" }, max_tokens: 48 };

export const RULES: Record<RuleKind, { title: string; label: string; about: string }> = {
  word: {
    title: "A word",
    label: LABELS["reward.word"],
    about:
      "An answer earns 1 if it has the word, in upper or lower case. If few answers have it, the model is first shown some.",
  },
  pattern: {
    title: "A pattern",
    label: LABELS["reward.pattern"],
    about: "An answer earns 1 if the expression is found in it. \\A and \\Z are its ends, as in Python.",
  },
  judge: {
    title: "A judge",
    label: LABELS["reward.judge"],
    about: "A language model grades each answer by your sentence, from 0 to 1. A small model judges badly.",
  },
};

/** What the rule says. */
export const ruleOf = (rule: Rule): string => rule[kindOf(rule)] ?? "";

export const kindOf = (rule: Rule): RuleKind => (Object.keys(rule)[0] ?? "word") as RuleKind;
