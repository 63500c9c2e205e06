/** `/v1/training/lesson`: prompts and a rule for the reward, from which the server teaches an adapter by itself. */

import { save } from "./adapters";
import { get, post, remove } from "./client";
import type { Answers, Bodies } from "./schema";

export type LessonStatus = Answers["GET /v1/training/lesson"];

export type Lesson = NonNullable<LessonStatus["lesson"]>;

/** A prompt, with the first answers to it and the newest ones. */
export type Prompt = Lesson["prompts"][number];

export type Message = Prompt["messages"][number];

export type Answer = Prompt["now"][number];

/** Examples that are imitated now: `number` of `examples`, for the `time`th of so many times. */
export type Showing = NonNullable<Lesson["showing"]>;

/** A lesson to begin, each prompt of which is a conversation. Fields that are left out have the route's defaults. */
export type NewLesson = Omit<Bodies["POST /v1/training/lesson"], "prompts"> & {
  prompts: readonly (readonly Message[])[];
};

/** How answers are rewarded: one of its fields. */
export type Rule = NewLesson["reward"];

export type RuleKind = keyof Rule;

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

/** The most likely answer of a base model or an adapter. */
export async function ask(model: string, messages: readonly Message[], max_tokens: number): Promise<string> {
  const answer = await post<Answers["POST /v1/chat/completions"]>("/v1/chat/completions", {
    model,
    messages,
    max_tokens,
    temperature: 0,
  });
  return answer.choices[0]?.message.content ?? "";
}
