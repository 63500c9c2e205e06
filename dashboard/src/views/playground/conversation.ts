/** The conversation, which stays while other views are shown. Each question goes to all sides at once. */

import { signal } from "@preact/signals";
import { ApiError, ConnectionError } from "../../api/client";
import { rate } from "../../api/people";
import { chat } from "../../live/chat";
import { person } from "../../live/stats";
import { type Answer, asked, messagesOf, type Turn, withChunk } from "./answer";

export interface Settings {
  system: string;
  temperature: number;
  maxTokens: number;
  seed: number;
}

export const turns = signal<readonly Turn[]>([]);
/** Stops the answers that are being made; null while there are none. */
export const underWay = signal<AbortController | null>(null);

let session = newSession();

/** The random number is no secret. `crypto.randomUUID` would need HTTPS. */
function newSession(): string {
  return `playground-${Math.random().toString(36).slice(2)}`;
}

export function clear(): void {
  underWay.value?.abort();
  turns.value = [];
  session = newSession();
}

/** Asks each of `models` the same. `learns`: the names whose answers are collected. Returns when all have answered. */
export async function ask(
  question: string,
  models: readonly string[],
  { system, temperature, maxTokens, seed }: Settings,
  learns: readonly string[],
): Promise<void> {
  const [before, stop] = [turns.value, new AbortController()];
  const requests = models.map((model, side) => ({
    model,
    messages: messagesOf(system, before, side, question),
    temperature,
    max_tokens: maxTokens,
    seed,
    ...(learns.includes(model) && { collect_trajectory: true as const }),
  }));
  turns.value = [...before, { question, answers: models.map(asked) }];
  underWay.value = stop;
  await Promise.all(
    requests.map(async (request, side) => {
      const change = (next: (answer: Answer) => Answer) => {
        if (turns.value.length > before.length) {
          changeAnswer(before.length, side, next); // unless the conversation was cleared meanwhile
        }
      };
      try {
        for await (const chunk of chat(request, session, stop.signal)) {
          change((answer) => withChunk(answer, chunk));
        }
      } catch (error) {
        change((answer) => ended(answer, error));
      }
    }),
  );
  underWay.value = underWay.value === stop ? null : underWay.value;
}

/** An answer whose stream has broken off. Any error costs this side only, and is said where the answer would be. */
function ended(answer: Answer, error: unknown): Answer {
  const known = error instanceof ApiError || error instanceof ConnectionError;
  if (known || !(error instanceof DOMException && error.name === "AbortError")) {
    return { ...answer, state: "failed", why: error instanceof Error ? error.message : String(error) };
  }
  return { ...answer, state: "stopped" };
}

function changeAnswer(turn: number, side: number, next: (answer: Answer) => Answer): void {
  turns.value = turns.value.map((each, place) =>
    place === turn ? { ...each, answers: each.answers.map((one, at) => (at === side ? next(one) : one)) } : each,
  );
}

/** Sends a thumb. It can be changed until the answer is trained on. */
export async function vote(turn: number, side: number, score: 0 | 1): Promise<string> {
  const trajectory = turns.value[turn]?.answers[side]?.trajectory;
  if (!trajectory) {
    return "";
  }
  const { late } = await rate(trajectory, score, person());
  changeAnswer(turn, side, (answer) => ({ ...answer, score }));
  return late
    ? "Noted. The answer is older than what updates take, so it is learnt from as late feedback."
    : "Noted. It counts at the next update.";
}
