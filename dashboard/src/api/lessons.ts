/** `/v1/training/lesson`: prompts and a rule for the reward, from which the server teaches an adapter by itself. */

import { save } from "./adapters";
import { get, post, remove } from "./client";

export interface Message {
  role: string;
  content: string;
}

/** How answers are rewarded; see the route's description at /docs. */
export type RuleKind = "word" | "pattern" | "judge";

export type Rule = Partial<Record<RuleKind, string>>;

export interface Answer {
  text: string;
  /** 0 to 1. */
  reward: number;
}

export interface Prompt {
  messages: readonly Message[];
  /** The first answers that were drawn, and the newest ones. */
  before: Answer[];
  now: Answer[];
}

/** The answers between two updates. `low` and `high`: the 95 % interval of their mean reward. */
export interface Point {
  update: number;
  reward: number;
  low: number;
  high: number;
  answers: number;
}

/** Examples that are imitated now: `number` of `examples`, for the `time`th of so many times. */
export interface Showing {
  /** 0 while they are being drawn. */
  examples: number;
  number: number;
  time: number;
  times: number;
  /** Of the update before. */
  loss: number | null;
}

export interface Lesson {
  id: string;
  state: "drawing" | "waiting" | "showing" | "paused" | "failed" | "ended";
  outcome: "learnt" | "finished" | "stopped" | "no_signal" | "failed" | "interrupted" | null;
  reason: string;
  advice: string;
  showing: Showing | null;
  lora_adapter: string;
  live_lora: string | null;
  /** Of the adapter as it was before. */
  checkpoint: string;
  reward: Rule;
  max_tokens: number;
  group_size: number;
  temperature: number;
  learning_rate: number;
  answers_per_update: number;
  updates: number;
  /** Answers that were imitated until now, because hardly any had earned a reward. */
  examples: number;
  most_updates: number | null;
  points: Point[];
  prompts: Prompt[];
  started: string;
  ended: string | null;
}

export interface LessonStatus {
  /** Why the server takes no lessons; empty if it does. */
  obstacle: string;
  lesson: Lesson | null;
}

/** Fields that are left out have the defaults of the route. */
export interface NewLesson {
  /** Each is a conversation that the answer continues. */
  prompts: readonly (readonly Message[])[];
  reward: Rule;
  max_tokens: number;
  group_size?: number;
  temperature?: number;
  learning_rate?: number;
  updates?: number;
  lora_adapter?: string;
}

export const asked = (content: string): readonly Message[] => [{ role: "user", content }];

/** The text of the last message, which is what is asked. */
export const textOf = (messages: readonly Message[]): string => messages.at(-1)?.content ?? "";

/** The same conversation with another last message. */
export const withText = (messages: readonly Message[], content: string): readonly Message[] => [
  ...messages.slice(0, -1),
  { role: messages.at(-1)?.role ?? "user", content },
];

const LESSON = "/v1/training/lesson";

export const lessonStatus = (): Promise<LessonStatus> => get(LESSON);

export const begin = (lesson: NewLesson): Promise<LessonStatus> => post(LESSON, lesson);

export const stop = (): Promise<LessonStatus> => remove(LESSON);

/** Serves the adapter as it was before the lesson. */
export const undo = (lesson: Lesson): Promise<unknown> =>
  post("/v1/training/rollback", { lora_adapter: lesson.lora_adapter, to: lesson.checkpoint });

/** Saves the adapter as it is, with the lesson's id as tag. A checkpoint with a tag is never removed to make room. */
export const keep = (lesson: Lesson): Promise<unknown> => save(lesson.lora_adapter, lesson.id);

interface Completion {
  choices: { message: { content: string } }[];
}

/** The most likely answer of a base model or an adapter. */
export async function ask(model: string, messages: readonly Message[], max_tokens: number): Promise<string> {
  const answer = await post<Completion>("/v1/chat/completions", { model, messages, max_tokens, temperature: 0 });
  return answer.choices[0]?.message.content ?? "";
}
