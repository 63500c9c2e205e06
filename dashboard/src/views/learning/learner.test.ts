import { expect, test } from "vitest";
import type { TrainedAdapter, TrainingShare } from "../../api/stats";
import { learner } from "./learner";

const adapter = (name: string, state = "idle", last_update: number | null = null): TrainedAdapter => ({
  name,
  state,
  step: 0,
  last_update,
});

const share = (adapters: TrainedAdapter[], lesson: string | null = null): TrainingShare => ({
  target: 0,
  measured: 0,
  adapters,
  lesson: lesson === null ? null : { adapter: lesson, state: "drawing", updates: 0 },
});

test("the adapter of a lesson learns, else one that is at work, else the one that learnt last", () => {
  const [usual, old, busy] = [adapter("default"), adapter("old", "idle", 10), adapter("busy", "running", 5)];
  expect(learner(share([usual, old, busy], "old"))).toBe("old");
  expect(learner(share([usual, old, busy]))).toBe("busy");
  expect(learner(share([usual, old]))).toBe("old");
  expect(learner(share([usual, adapter("other")]))).toBe("default");
  expect(learner(share([]))).toBeUndefined();
});
