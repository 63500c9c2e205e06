/** Waits between attempts to reach the server: short at first, and never so long that a person would notice. */

const FIRST_MS = 250;
const LONGEST_MS = 1500;

export class Backoff {
  #next = FIRST_MS;

  /** The time to wait before the next attempt, in milliseconds. */
  next(): number {
    const wait = this.#next;
    this.#next = Math.min(2 * wait, LONGEST_MS);
    return wait;
  }

  reset(): void {
    this.#next = FIRST_MS;
  }
}

/** Ends early, without an error, if `stop` is aborted. */
export const pause = (ms: number, stop: AbortSignal): Promise<void> =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    stop.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
