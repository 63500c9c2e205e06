import { expect, test } from "vitest";
import type { AdapterVersion, Checkpoint } from "../../api/adapters";
import type { TrainingState } from "../../api/learning";
import type { Model } from "../../api/models";
import { groupsOf, type Known, learns } from "./versions";

const base = (id: string, root = id, state: Model["state"] = "loaded") => ({ id, root, parent: null, state }) as Model;
const version = (name: string, number: number, live: boolean) =>
  ({ id: `${name}@${number}`, name, live }) as AdapterVersion;
const checkpoint = (name: string, lora_adapter: string) => ({ name, lora_adapter }) as Checkpoint;

const KNOWN: Known = {
  models: [
    base("org/first"),
    base("first", "org/first"),
    base("base", "org/first"),
    base("second", "second", "idle"),
    { id: "tone", root: "tone", parent: "org/first", version: 3 } as Model,
  ],
  versions: [version("tone", 2, false), version("tone", 3, true)],
  checkpoints: [
    checkpoint("checkpoint-1", "tone@1"),
    checkpoint("checkpoint-3", "tone@3"),
    checkpoint("checkpoint-4", "other@1"),
  ],
  training: { lora_adapter: "tone", live_lora: "tone@3" } as TrainingState,
};

test("each base model and version is there once, and the first base model without the route", () => {
  expect(groupsOf(KNOWN).map(({ title, choices }) => [title, choices.map(({ name }) => name)])).toEqual([
    ["Base models", ["base", "second"]],
    ["Adapters", ["tone"]],
    ["Other versions", ["tone@2"]],
    ["Checkpoints", ["checkpoint-1"]],
  ]);
});

test("a server without adapters has its base model", () => {
  const [first] = KNOWN.models;
  const bare = { ...KNOWN, models: first ? [first] : [], versions: [], checkpoints: [], training: null };
  expect(groupsOf(bare)).toEqual([{ title: "Base models", choices: [{ name: "base", label: "org/first (base)" }] }]);
});

test("what is in training learns, and the base model as long as the default adapter has no version", () => {
  const answers = (name: string) => learns(name, ["tone"], KNOWN);
  expect(["tone", "tone@2", "checkpoint-1", "checkpoint-4", "second", "base"].map(answers)).toEqual([
    true,
    true,
    true,
    false,
    false,
    false,
  ]);
  const fresh = { ...KNOWN, training: { ...KNOWN.training, live_lora: null } as TrainingState };
  expect(learns("base", ["tone"], fresh)).toBe(true);
});
