/**
 * Asks the server for its figures every second, for all views. It is the page's heartbeat too: while it gets no answer,
 * the connection counts as lost. It rests while nobody looks at the page.
 */

import { signal } from "@preact/signals";
import { ApiError, loggedOut } from "../api/client";
import { type Interval, type Stats, stats } from "../api/stats";
import { Backoff, pause } from "./backoff";

const EVERY_MS = 1000;
const KEPT = 300;

/** The newest figures; null before the first answer. */
export const now = signal<Stats | null>(null);
/** The intervals of the last minutes, oldest first. */
export const history = signal<readonly Interval[]>([]);
/** Since when the server does not answer, in milliseconds since the epoch; null while it does. */
export const lostSince = signal<number | null>(null);
/** Why the server refuses its figures, if it does. */
export const refused = signal<ApiError | null>(null);

/** Who says so, in thumbs and corrections: the name of the key. Without keys, all are one person. */
export const person = (): string | undefined => (now.value?.caller.required ? now.value.caller.name : undefined);

/** Begins to ask. Called once, when the page opens. */
export function watch(): void {
  void run(new AbortController().signal);
}

async function run(stop: AbortSignal): Promise<void> {
  const backoff = new Backoff();
  while (!loggedOut.value) {
    await untilVisible();
    try {
      take(await stats(history.value.at(-1)?.number ?? 0));
      backoff.reset();
      await pause(EVERY_MS, stop);
    } catch (error) {
      fail(error);
      await pause(backoff.next(), stop);
    }
  }
}

function take(answer: Stats): void {
  const restarted = now.value !== null && now.value.started_at !== answer.started_at;
  const kept = restarted ? [] : history.value;
  // The server sends everything again after a restart, unless it has counted past our last interval meanwhile. Then the
  // intervals before that are missing until they have left the window.
  history.value = [...kept, ...answer.intervals].slice(-KEPT);
  now.value = answer;
  lostSince.value = null;
  refused.value = null;
}

function fail(error: unknown): void {
  if (error instanceof ApiError) {
    lostSince.value = null;
    refused.value = error;
  } else {
    lostSince.value ??= Date.now();
  }
}

const untilVisible = (): Promise<void> =>
  new Promise((resolve) => {
    if (!document.hidden) {
      resolve();
      return;
    }
    const listener = () => {
      if (!document.hidden) {
        document.removeEventListener("visibilitychange", listener);
        resolve();
      }
    };
    document.addEventListener("visibilitychange", listener);
  });
