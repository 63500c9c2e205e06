import { expect, test } from "vitest";
import { type CourseEvent, courseOf } from "./course";

const event = (kind: string, data: CourseEvent["data"]): CourseEvent => ({
  kind,
  at: "2026-01-31T12:00:00.000Z",
  data: { adapter: "tone", ...data },
});

const update = (version: number, reward: number): CourseEvent =>
  event("update", { version: `tone@${version}`, status: "published", metrics: { reward_mean: reward } });

const fates = (events: readonly CourseEvent[]) =>
  Object.fromEntries(courseOf(events).versions.map((version) => [version.name, version.fate]));

test("each update makes a version of the one before", () => {
  const { updates, versions } = courseOf([event("started", { version: "base@0" }), update(1, 0.25), update(2, 0.5)]);
  expect(updates.map(({ number, metrics }) => [number, metrics.reward_mean])).toEqual([
    [1, 0.25],
    [2, 0.5],
  ]);
  expect(versions.map(({ name, parent, fate }) => [name, parent, fate])).toEqual([
    ["base@0", null, "replaced"],
    ["tone@1", "base@0", "replaced"],
    ["tone@2", "tone@1", "live"],
  ]);
});

test("a rollback ends a branch, and the next version begins another one", () => {
  const back = [
    update(1, 0.5),
    update(2, 0.4),
    update(3, 0.1),
    event("rollback", { version: "tone@1" }),
    update(4, 0.6),
  ];
  expect(fates(back)).toEqual({
    "tone@1": "replaced",
    "tone@2": "rolled back",
    "tone@3": "rolled back",
    "tone@4": "live",
  });
  expect(courseOf(back).versions.at(-1)?.parent).toBe("tone@1");
});

test("an update that is not published makes no version, and one that is held is told", () => {
  const trained = event("update", { version: "tone@1", status: "trained", metrics: { reward_mean: 1 } });
  const held = event("held", { version: "tone@1", status: "held", reason: "too_far" });
  const { updates, versions, moments } = courseOf([update(1, 0), trained, held]);
  expect(versions).toHaveLength(1);
  expect(updates).toHaveLength(2);
  expect(moments).toMatchObject([{ what: "An update was held", why: "too far", wrong: true }]);
});

test("evaluations and checkpoints belong to their versions", () => {
  const metrics = { eval_mean: 0.5, eval_low: 0.25, eval_high: 0.75 };
  const { versions, evaluations } = courseOf([
    update(1, 0),
    event("evaluation", { version: "tone@1", metrics }),
    update(2, 0),
    event("checkpoint", { version: "tone@1", checkpoint: "checkpoint-1", tags: ["best", "mine"] }),
  ]);
  expect(evaluations).toEqual([{ update: 1, mean: 0.5, low: 0.25, high: 0.75 }]);
  expect(versions[0]).toMatchObject({ checkpoint: "checkpoint-1", tags: ["mine"], evaluation: evaluations[0] });
});

test("events that were lost are told where they are missing", () => {
  expect(courseOf([event("events_lost", { events: 12 })]).moments[0]?.what).toBe("12 events were missed");
  expect(courseOf([event("events_lost", { events: null })]).moments[0]?.what).toBe("Events were missed");
});

test("updates are paused until they are resumed or training starts again", () => {
  const paused = event("paused", { reason: "asked" });
  expect(courseOf([paused, update(1, 0)]).paused).toBe(true);
  expect(courseOf([paused, event("resumed", {})]).paused).toBe(false);
  expect(courseOf([paused, event("started", { version: "tone@1" })]).paused).toBe(false);
});
