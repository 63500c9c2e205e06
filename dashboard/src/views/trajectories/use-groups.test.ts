import { expect, test } from "vitest";
import type { GroupRow } from "../../api/trajectories";
import { merged } from "./use-groups";

const row = (number: number, fate: GroupRow["fate"] = "waiting"): GroupRow => ({
  number,
  group_id: `g${number}`,
  prompt: "",
  samples: 2,
  reward: null,
  lora_adapter: "default",
  lora_versions: [],
  fate,
  reason: "",
  signal: "rewards",
  created: "",
});

test("new groups are counted, and those in the list change where they are", () => {
  const { rows, fresh } = merged([row(3), row(2), row(1)], [row(5), row(4), row(3, "trained")]);
  expect(rows).toEqual([row(3, "trained"), row(2), row(1)]);
  expect(fresh).toBe(2);
});

test("an empty list takes what has come", () => {
  expect(merged([], [row(2), row(1)])).toEqual({ rows: [row(2), row(1)], fresh: 0 });
});
