import { useEffect, useState } from "preact/hooks";
import { ApiError } from "../../api/client";
import { trainingHistory } from "../../api/learning";
import { TRAINING_EVENTS } from "../../api/training";
import { pause } from "../../live/backoff";
import { follow, type Gap } from "../../live/events";
import type { CourseEvent } from "./course";

export interface Watched {
  /** Oldest first; null before the first answer. */
  events: readonly CourseEvent[] | null;
  /** Older events are not shown. */
  truncated: boolean;
  refused: ApiError | null;
}

const RETRY_MS = 1500;
const NONE: Watched = { events: null, truncated: false, refused: null };

/** The history of an adapter's training, and from there on its events as they come. */
export function useEvents(adapter: string): Watched {
  const [watched, setWatched] = useState(NONE);
  useEffect(() => {
    setWatched(NONE);
    const watcher = new Watcher(adapter, setWatched);
    void watcher.begin();
    return () => watcher.end();
  }, [adapter]);
  return watched;
}

class Watcher {
  readonly #stop = new AbortController();
  #unfollow = (): void => {};
  #events: readonly CourseEvent[] = [];
  #gaps: readonly CourseEvent[] = [];
  #truncated = false;

  constructor(
    readonly adapter: string,
    readonly show: (watched: Watched) => void,
  ) {}

  /** Asks for the history until there is an answer, and follows the events after it. */
  async begin(): Promise<void> {
    while (!this.#stop.signal.aborted) {
      try {
        const past = await trainingHistory(this.adapter);
        if (this.#stop.signal.aborted) {
          return;
        }
        this.#events = past.data;
        this.#truncated = past.truncated;
        this.#tell();
        this.#follow(past.last_event_id);
        return;
      } catch (error) {
        if (error instanceof ApiError && error.status < 500) {
          this.#refuse(error);
          return;
        }
        await pause(RETRY_MS, this.#stop.signal);
      }
    }
  }

  end(): void {
    this.#stop.abort();
    this.#unfollow();
  }

  #follow(after: string): void {
    this.#unfollow = follow<CourseEvent>(
      TRAINING_EVENTS,
      {
        onEvent: (_, event) => this.#take(event),
        onGap: (gap) => this.#beginAgain(gap),
        onRefused: (error) => this.#refuse(error),
      },
      after,
    );
  }

  #take(event: CourseEvent): void {
    if (concerns(event, this.adapter) && !OF_TRAJECTORIES.has(event.kind)) {
      this.#events = [...this.#events, event];
      this.#tell();
    }
  }

  #beginAgain(gap: Gap): void {
    this.#unfollow();
    const at = new Date(1000 * gap.at).toISOString();
    this.#gaps = [...this.#gaps, { kind: "events_lost", at, data: { events: gap.events } }];
    void this.begin();
  }

  #tell(): void {
    const events = [...this.#events, ...this.#gaps].sort((one, other) => one.at.localeCompare(other.at));
    this.show({ events, truncated: this.#truncated, refused: null });
  }

  readonly #refuse = (refused: ApiError): void => this.show({ ...NONE, refused });
}

/** An average concerns the adapters that it is of, too. */
const concerns = ({ data }: CourseEvent, adapter: string): boolean =>
  data.adapter === adapter || (data.adapters ?? []).some((version) => version.startsWith(`${adapter}@`));

/** Kinds of events about single trajectories. */
const OF_TRAJECTORIES = new Set(["collected", "closed", "scored", "dropped"]);
