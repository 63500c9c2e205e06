/** One answer while it is made of the chunks of its stream, and the history that the next request has. */

import type { ChatChunk, ChatMessage, DrawnToken } from "../../live/chat";

/** Text and the tokens that it was made of. The text of a token may come with a later one, which completes a character. */
export interface Part {
  text: string;
  /** It is reasoning before the answer, which no later request has. */
  reasoning: boolean;
  tokens: readonly DrawnToken[];
}

export interface Answer {
  /** The name that the request has. */
  model: string;
  /** The version or the base model that answers; empty until it is known. */
  by: string;
  parts: readonly Part[];
  state: "asked" | "complete" | "cut off" | "repeated" | "stopped" | "failed";
  /** Why it failed, or why it will not be learnt from. */
  why: string;
  /** If it is collected and complete. */
  trajectory: string | null;
  /** 1 for a thumb up, 0 for one down. */
  score: number | null;
}

const ENDINGS: Record<string, Answer["state"]> = { length: "cut off", repetition: "repeated" };

export interface Turn {
  question: string;
  /** One for each side. */
  answers: readonly Answer[];
}

export const asked = (model: string): Answer => ({
  model,
  by: "",
  parts: [],
  state: "asked",
  why: "",
  trajectory: null,
  score: null,
});

/** The answer with what a chunk adds. */
export function withChunk(answer: Answer, chunk: ChatChunk): Answer {
  const [choice] = chunk.choices;
  return {
    ...answer,
    by: chunk.lora_adapter ?? chunk.model,
    parts: choice ? withTokens(answer.parts, choice) : answer.parts,
    state: choice?.finish_reason ? (ENDINGS[choice.finish_reason] ?? "complete") : answer.state,
    why: chunk.trajectory_warning ?? answer.why,
    trajectory: chunk.trajectory_ids?.[0] ?? answer.trajectory,
  };
}

function withTokens(parts: readonly Part[], { delta, logprobs }: ChatChunk["choices"][number]): readonly Part[] {
  const tokens = logprobs?.content ?? [];
  const text = delta.content || delta.reasoning_content || "";
  if (text === "" && tokens.length === 0) {
    return parts;
  }
  const last = parts.at(-1);
  const waiting = last?.text === "" ? last.tokens : [];
  const before = waiting.length > 0 ? parts.slice(0, -1) : parts;
  return [...before, { text, reasoning: !delta.content && text !== "", tokens: [...waiting, ...tokens] }];
}

/** What later requests have of an answer. */
export const textOf = ({ parts }: Answer): string =>
  parts.map(({ text, reasoning }) => (reasoning ? "" : text)).join("");

/**
 * The messages of a request of one side: what was said on this side or, before it was chosen, on the first one. A question
 * without an answer is left out, but for the last one.
 */
export function messagesOf(system: string, turns: readonly Turn[], side: number, question: string): ChatMessage[] {
  const said = turns.flatMap((turn): ChatMessage[] => {
    const answer = turn.answers[side] ?? turn.answers[0];
    const content = answer ? textOf(answer) : "";
    return content
      ? [
          { role: "user", content: turn.question },
          { role: "assistant", content },
        ]
      : [];
  });
  const first: ChatMessage[] = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...said, { role: "user", content: question }];
}
