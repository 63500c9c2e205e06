/** Asks for an answer of a chat, and gives it while it is made. */

import { ApiError, ConnectionError, send } from "../api/client";
import { messagesOf } from "./messages";

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string;
}

/** The fields of `POST /v1/chat/completions` that are sent from here; see /docs. */
export interface ChatRequest {
  /** `base`, another base model, an adapter, `name@version`, or a checkpoint. */
  model: string;
  messages: readonly ChatMessage[];
  temperature: number;
  max_tokens: number;
  seed: number;
  /** The answer may be rewarded, and is then learnt from. */
  collect_trajectory?: true;
}

/** A token with the logarithm of its probability, of the model before temperature. */
export interface TokenLogprob {
  token: string;
  logprob: number;
}

export interface DrawnToken extends TokenLogprob {
  /** The most likely tokens in its place, best first. */
  top_logprobs: readonly TokenLogprob[];
}

export interface ChatChunk {
  model: string;
  /** The version that answers, as `name@version`; not there for a base model. */
  lora_adapter?: string;
  choices: readonly {
    delta: { content?: string | null; reasoning_content?: string | null };
    logprobs: { content: readonly DrawnToken[] } | null;
    finish_reason: string | null;
  }[];
  /** In the last chunk of an answer that is collected. */
  trajectory_ids?: readonly string[];
  /** Why it will not be trained on. */
  trajectory_warning?: string;
}

/** How many alternatives to each token are asked for. */
const ALTERNATIVES = 5;

/**
 * The chunks of one answer. `session`: while two versions of an adapter are compared, one of them answers all requests of
 * a session. Raises ApiError and ConnectionError, also in the middle; AbortError after `stop`.
 */
export async function* chat(request: ChatRequest, session: string, stop: AbortSignal): AsyncGenerator<ChatChunk> {
  const answer = await send("/v1/chat/completions", {
    method: "POST",
    signal: stop,
    headers: { "content-type": "application/json", "x-session-id": session },
    body: JSON.stringify({ ...request, stream: true, logprobs: true, top_logprobs: ALTERNATIVES }),
  });
  try {
    for await (const { data } of messagesOf(answer)) {
      if (data === "[DONE]") {
        return;
      }
      yield chunkOf(JSON.parse(data));
    }
  } catch (error) {
    throw error instanceof TypeError ? new ConnectionError() : error; // a stream that breaks is a TypeError
  }
  throw new ConnectionError();
}

/** A stream that fails after its beginning says so in a chunk. */
function chunkOf(data: ChatChunk | { error: { code: string | null; message: string } }): ChatChunk {
  if ("error" in data) {
    throw new ApiError(200, data.error.code ?? "", data.error.message);
  }
  return data;
}
