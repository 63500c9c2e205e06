/** All that the view shows, and how it asks for it again. */

import { useCallback } from "preact/hooks";
import {
  type Adapters,
  adapters,
  type Checkpoint,
  type Comparison,
  checkpoints,
  comparisons,
} from "../../api/adapters";
import { may } from "../../components/action";
import { usePolled } from "../../live/polled";
import { now } from "../../live/stats";

const EVERY_MS = 2000;

export interface Overview {
  adapters: Adapters;
  /** Empty without the role train. */
  checkpoints: readonly Checkpoint[];
  /** Empty if the server does not train. */
  comparisons: readonly Comparison[];
  /** Names of the adapters in training. */
  trained: readonly string[];
}

export function useOverview(): { overview: Overview | null; why: string; again: () => void } {
  const trains = may("train");
  const trained = now.value?.training?.adapters.map((adapter) => adapter.name) ?? null;
  const compares = trains && trained !== null;
  const ask = useCallback(async (): Promise<Omit<Overview, "trained">> => {
    const [all, saved, compared] = await Promise.all([
      adapters(),
      trains ? checkpoints() : [],
      compares ? comparisons() : [],
    ]);
    return { adapters: all, checkpoints: saved, comparisons: compared };
  }, [trains, compares]);
  const { value, refused, again } = usePolled(`${trains} ${compares}`, ask, EVERY_MS);
  return { overview: value && { ...value, trained: trained ?? [] }, why: refused?.message ?? "", again };
}
