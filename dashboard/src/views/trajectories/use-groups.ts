import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError } from "../../api/client";
import { type Filters, type GroupRow, groups } from "../../api/trajectories";
import { pause } from "../../live/backoff";

export interface Listed {
  /** Newest first; null before the first answer. */
  rows: readonly GroupRow[] | null;
  /** Groups that have come since the list was made, and are not in it. */
  fresh: number;
  /** There are older groups than those in the list. */
  more: boolean;
  refused: ApiError | null;
}

export interface Groups extends Listed {
  /** Adds older groups to the end, if there are any. */
  older: () => void;
  /** Makes the list again, with the newest groups. */
  again: () => void;
  /** How often that was done. */
  made: number;
}

const PAGE = 500;
/** The newest groups, which are asked for again to see what has come and what has changed. */
export const LOOKED_AT = 100;
const EVERY_MS = 3000;
const RETRY_MS = 1500;
const NONE: Listed = { rows: null, fresh: 0, more: false, refused: null };

/**
 * The groups that pass the filters. New ones are counted and not added, so that nothing moves while somebody reads; what
 * becomes of those in the list is shown as it happens. `epoch`: when it changes, the numbers of groups begin again.
 */
export function useGroups(filters: Filters, epoch: number): Groups {
  const [listed, setListed] = useState(NONE);
  const [asked, setAsked] = useState(0);
  const key = JSON.stringify([filters, epoch, asked]);
  const lister = useMemo(() => new Lister(filters, setListed), [key]);
  useEffect(() => {
    void lister.run();
    return () => lister.end();
  }, [lister]);
  return { ...listed, older: () => void lister.older(), again: () => setAsked((count) => count + 1), made: asked };
}

class Lister {
  readonly #stop = new AbortController();
  #rows: readonly GroupRow[] = [];
  #more = false;
  #asking = false;

  constructor(
    readonly filters: Filters,
    readonly show: (listed: Listed) => void,
  ) {}

  end(): void {
    this.#stop.abort();
  }

  /** Asks for the first page until there is an answer, and then for what is new. */
  async run(): Promise<void> {
    let begun = false;
    while (!this.#stop.signal.aborted) {
      try {
        if (!begun) {
          await this.#begin();
          begun = true;
        } else if (!document.hidden) {
          await this.#look();
        }
      } catch (error) {
        if (error instanceof ApiError && error.status < 500) {
          this.#tell({ ...NONE, refused: error });
          return;
        }
      }
      await pause(begun ? EVERY_MS : RETRY_MS, this.#stop.signal);
    }
  }

  async older(): Promise<void> {
    if (!this.#more || this.#asking) {
      return;
    }
    this.#asking = true;
    try {
      const page = await groups(this.filters, PAGE, this.#rows.at(-1)?.number);
      this.#rows = [...this.#rows, ...page.data];
      this.#more = page.has_more;
      this.#tell({ ...NONE, rows: this.#rows });
    } catch {
      // The page itself says that the connection is lost, and the end of the list is reached again by scrolling.
    } finally {
      this.#asking = false;
    }
  }

  async #begin(): Promise<void> {
    const page = await groups(this.filters, PAGE);
    this.#rows = page.data;
    this.#more = page.has_more;
    this.#tell({ ...NONE, rows: this.#rows });
  }

  async #look(): Promise<void> {
    const { data } = await groups(this.filters, LOOKED_AT);
    const { rows, fresh } = merged(this.#rows, data);
    this.#rows = rows;
    this.#tell({ ...NONE, rows, fresh });
  }

  #tell(listed: Listed): void {
    if (!this.#stop.signal.aborted) {
      this.show({ ...listed, more: this.#more });
    }
  }
}

/** The rows as they are now, in the same order, and the number of groups that are newer than all of them. An empty list
 * takes the new ones, because nobody reads it. */
export function merged(
  rows: readonly GroupRow[],
  newest: readonly GroupRow[],
): { rows: readonly GroupRow[]; fresh: number } {
  const [first] = rows;
  if (first === undefined) {
    return { rows: newest, fresh: 0 };
  }
  const changed = new Map(newest.map((row) => [row.number, row]));
  const current = rows.slice(0, newest.length).map((row) => changed.get(row.number) ?? row);
  return {
    rows: [...current, ...rows.slice(newest.length)],
    fresh: newest.filter((row) => row.number > first.number).length,
  };
}
