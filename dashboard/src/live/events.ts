/**
 * Follows a stream of server-sent events, and connects again when it breaks.
 *
 * `fetch` is used and not `EventSource`, because that hides the status: a 403 must be said in words, and not be tried
 * again.
 */

import { ApiError, send } from "../api/client";
import { Backoff, pause } from "./backoff";
import { messagesOf } from "./messages";
import type { Message } from "./parser";

/** Events were lost, at this time in Unix seconds. `events`: how many, or null if that is not known. */
export interface Gap {
  at: number;
  events: number | null;
}

export interface Follower<E> {
  onEvent: (kind: string, event: E, id: string) => void;
  onGap: (gap: Gap) => void;
  /** The server refuses the stream, such as with 403 or 409. It is not asked again. */
  onRefused: (error: ApiError) => void;
}

/** Kind of the event by which the server says that this client read too slowly. */
const LOST = "events_lost";

/** Follows the stream at `path` until the returned function is called. `after`: the id of the event to begin after. */
export function follow<E>(path: string, follower: Follower<E>, after = ""): () => void {
  const stop = new AbortController();
  void new Stream(path, follower, stop.signal, after).run();
  return () => stop.abort();
}

class Stream<E> {
  #id: string;
  #connected = false;
  readonly #backoff = new Backoff();

  constructor(
    readonly path: string,
    readonly follower: Follower<E>,
    readonly stop: AbortSignal,
    after: string,
  ) {
    this.#id = after;
  }

  async run(): Promise<void> {
    while (!this.stop.aborted) {
      try {
        await this.#read();
      } catch (error) {
        if (isRefusal(error)) {
          this.follower.onRefused(error);
          return;
        }
      }
      await pause(this.#backoff.next(), this.stop);
    }
  }

  /** Reads one connection to its end. The server sends what was missed after `Last-Event-ID`, if it can. */
  async #read(): Promise<void> {
    const headers = this.#id ? { "last-event-id": this.#id } : undefined;
    const answer = await send(this.path, { signal: this.stop, ...(headers && { headers }) });
    this.#opened();
    for await (const message of messagesOf(answer)) {
      this.#take(message);
    }
  }

  #opened(): void {
    if (this.#connected && !this.#id) {
      this.follower.onGap({ at: Date.now() / 1000, events: null });
    }
    this.#connected = true;
    this.#backoff.reset();
  }

  #take(message: Message): void {
    this.#id = message.id;
    if (message.data === "[DONE]") {
      return;
    }
    const event = JSON.parse(message.data);
    if (message.kind === LOST) {
      this.follower.onGap({ at: Date.parse(event.at) / 1000, events: event.data.events });
    } else {
      this.follower.onEvent(message.kind, event as E, message.id);
    }
  }
}

/** Whether asking again would change nothing. A server that starts or drains answers 503, and is asked again. */
const isRefusal = (error: unknown): error is ApiError =>
  error instanceof ApiError && error.status < 500 && error.status !== 429;
