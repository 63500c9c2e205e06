import { useCallback, useEffect, useState } from "preact/hooks";
import { ApiError } from "../api/client";
import { pause } from "./backoff";

export interface Polled<T> {
  /** The newest answer; null before the first one. */
  value: T | null;
  /** Why the server refuses, if it does. A lost connection is shown by the page itself. */
  refused: ApiError | null;
  /** Asks at once, such as after a change. */
  again: () => void;
}

/**
 * Asks the server again and again while a component is shown, and not while nobody looks at the page. `key` names what is
 * asked for: when it changes, the old answer is dropped.
 */
export function usePolled<T>(key: string, ask: () => Promise<T>, everyMs: number): Polled<T> {
  const [answer, setAnswer] = useState<{ key: string; value: T | null; refused: ApiError | null } | null>(null);
  const [asked, setAsked] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    const run = async () => {
      while (!stop.signal.aborted) {
        if (!document.hidden) {
          const [value, refused] = await ask().then((value) => [value, null] as const, refusal);
          if (!stop.signal.aborted && (value !== null || refused !== null)) {
            setAnswer({ key, value, refused });
          }
        }
        await pause(everyMs, stop.signal);
      }
    };
    void run();
    return () => stop.abort();
  }, [key, everyMs, asked]);
  const again = useCallback(() => setAsked((count) => count + 1), []);
  const current = answer?.key === key ? answer : { value: null, refused: null };
  return { value: current.value, refused: current.refused, again };
}

const refusal = (error: unknown): readonly [null, ApiError | null] => [null, error instanceof ApiError ? error : null];
