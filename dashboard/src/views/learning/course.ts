/** The course of one adapter's training, made from its events: updates, versions, and what else has happened. */

import type { Metric } from "../../api/learning";
import type { TrainingEvent } from "../../api/training";
import { because } from "../trajectories/reasons";

/** The fields of an event's data that are read here; which of them there are depends on the kind. */
interface Data {
  adapter?: string;
  /** The versions that an average is of. */
  adapters?: readonly string[];
  version?: string | null;
  live?: string;
  candidate?: string;
  status?: string;
  reason?: string;
  verdict?: string;
  action?: string;
  reward?: number;
  signal?: string;
  checkpoint?: string;
  outcome?: string;
  tags?: string[];
  metrics?: Partial<Record<Metric, number | null>>;
  events?: number | null;
}

export type CourseEvent = TrainingEvent<Data>;

export interface Update {
  /** Its place among the updates that are known, from 1. */
  number: number;
  metrics: Partial<Record<Metric, number | null>>;
}

export interface Evaluated {
  /** The number of the update before it; 0 before the first one. */
  update: number;
  mean: number;
  low: number;
  high: number;
}

export type Fate = "live" | "replaced" | "rolled back" | "not published";

export interface Version {
  /** `name@version`. */
  name: string;
  at: string;
  /** The version that it was trained from, if that is known. */
  parent: string | null;
  reward: number | null;
  evaluation: Evaluated | null;
  fate: Fate;
  checkpoint: string | null;
  tags: readonly string[];
}

/** Something that has happened, in words. */
export interface Moment {
  at: string;
  what: string;
  why: string;
  /** It needs attention. */
  wrong: boolean;
}

export interface Course {
  updates: readonly Update[];
  evaluations: readonly Evaluated[];
  versions: readonly Version[];
  moments: readonly Moment[];
  /** No update begins until somebody resumes them; one that has begun ends first. */
  paused: boolean;
}

export function courseOf(events: readonly CourseEvent[]): Course {
  const course = new Making();
  for (const event of events) {
    course.take(event);
  }
  return course;
}

class Making implements Course {
  readonly updates: Update[] = [];
  readonly evaluations: Evaluated[] = [];
  readonly moments: Moment[] = [];
  paused = false;
  readonly #versions = new Map<string, Version>();
  #live: string | null = null;

  get versions(): readonly Version[] {
    return [...this.#versions.values()];
  }

  take(event: CourseEvent): void {
    const { kind, at, data } = event;
    if (kind === "update") {
      this.#update(at, data);
    } else if (kind === "evaluation") {
      this.#evaluated(at, data);
    } else if (kind === "rollback" && data.version) {
      this.#rolledBack(at, data.version);
    } else if (kind === "started" && data.version) {
      this.#goesLive(at, data.version);
    } else if (kind === "checkpoint" && data.version) {
      const saved = this.#version(at, data.version, this.#live);
      const tags = (data.tags ?? []).filter((tag) => !PASSING.includes(tag));
      this.#versions.set(saved.name, { ...saved, checkpoint: data.checkpoint ?? null, tags });
    } else if (kind === "comparison_ended" && data.verdict === "promoted" && data.candidate) {
      this.#goesLive(at, data.candidate);
    }
    this.paused = kind === "paused" || (this.paused && kind !== "resumed" && kind !== "started");
    const said = SAID[kind]?.(data);
    if (said) {
      this.moments.push({ at, wrong: false, why: because(data.reason ?? ""), ...said });
    }
  }

  #update(at: string, { version, status, metrics = {} }: Data): void {
    this.updates.push({ number: this.updates.length + 1, metrics });
    if (version && status !== "trained") {
      this.#version(at, version, this.#live);
      this.#versions.set(version, { ...this.#version(at, version, null), reward: metrics.reward_mean ?? null });
      this.#goesLive(at, version);
    }
    if (metrics.eval_mean != null && version) {
      this.#evaluated(at, { version, metrics });
    }
  }

  #evaluated(at: string, { version, metrics = {} }: Data): void {
    const { eval_mean: mean, eval_low: low, eval_high: high } = metrics;
    if (mean != null && version) {
      const evaluation = { update: this.updates.length, mean, low: low ?? mean, high: high ?? mean };
      this.evaluations.push(evaluation);
      this.#versions.set(version, { ...this.#version(at, version, this.#live), evaluation });
    }
  }

  /** What came after the version that is live again is not continued. */
  #rolledBack(at: string, to: string): void {
    let gone = this.#live;
    while (gone !== null && gone !== to) {
      const version: Version | undefined = this.#versions.get(gone);
      if (version) {
        this.#versions.set(gone, { ...version, fate: "rolled back" });
      }
      gone = version?.parent ?? null;
    }
    this.#goesLive(at, to);
  }

  #goesLive(at: string, name: string): void {
    const before = this.#live === null || this.#live === name ? undefined : this.#versions.get(this.#live);
    if (before?.fate === "live") {
      this.#versions.set(before.name, { ...before, fate: "replaced" });
    }
    this.#versions.set(name, { ...this.#version(at, name, this.#live), fate: "live" });
    this.#live = name;
  }

  /** The version as it is known, or a new one. */
  #version(at: string, name: string, parent: string | null): Version {
    const known = this.#versions.get(name);
    const from = parent === name ? null : parent;
    const blank = { reward: null, evaluation: null, fate: "not published" as const, checkpoint: null, tags: [] };
    const version = known ?? { name, at, parent: from, ...blank };
    this.#versions.set(name, version);
    return version;
  }
}

const counted = (events: number | null | undefined): string => (events == null ? "Events" : `${events} events`);

/** Tags that another checkpoint may have got since. */
const PASSING = ["best", "latest"];

/** What is said about events of each kind; updates and evaluations are in the charts. */
const SAID: Record<string, (data: Data) => Partial<Moment> & { what: string }> = {
  started: ({ version }) => ({ what: `Training started from ${version}` }),
  stopped: () => ({ what: "Training stopped; the live version stays" }),
  paused: () => ({ what: "Updates paused" }),
  resumed: () => ({ what: "Updates resumed" }),
  held: () => ({ what: "An update was held", wrong: true }),
  skipped: () => ({ what: "An update was skipped" }),
  rollback: ({ version }) => ({ what: `Rolled back to ${version}`, wrong: true }),
  divergence: ({ signal, action }) => ({
    what: `Divergence of ${signal}: ${ACTIONS[action ?? ""] ?? action}`,
    wrong: true,
  }),
  plateau: ({ reward }) => ({ what: `Nearly all answers earn ${reward}`, wrong: true }),
  plateau_ended: () => ({ what: "Rewards differ again" }),
  evaluation_failed: ({ version }) => ({ what: `The evaluation of ${version} failed`, wrong: true }),
  checkpoint: ({ version, checkpoint }) => ({ what: `${version} saved as ${checkpoint}` }),
  comparison_started: ({ live, candidate }) => ({ what: `${candidate} competes with ${live}` }),
  comparison_ended: ({ candidate, verdict }) => ({
    what: `Comparison ended: ${candidate} ${VERDICTS[verdict ?? ""] ?? verdict}`,
  }),
  averaged: ({ adapter, adapters = [], version }) => ({
    what: `Average of ${adapters.join(", ")}: ${version ? `${version} is live` : `held, not live as ${adapter}`}`,
    wrong: !version,
  }),
  lesson_started: () => ({ what: "A lesson started" }),
  lesson_ended: ({ outcome }) => ({ what: `The lesson ended: ${outcome}` }),
  events_lost: ({ events }) => ({
    what: `${counted(events)} were missed`,
    why: "The history was asked for again; of the time before a restart of the server it has updates and evaluations only.",
    wrong: true,
  }),
};

const ACTIONS: Record<string, string> = {
  tell: "only reported",
  hold: "the update was held",
  pause: "updates paused",
  roll_back: "rolled back",
};

export const VERDICTS: Record<string, string> = {
  running: "is being compared",
  promoted: "won and is live",
  withdrawn: "was worse and is withdrawn",
  no_difference: "makes no difference",
  stopped: "was stopped",
  failed: "could not go live",
};
