/** `GET /v1/stats`: what the server does now, and did in the last minutes. Times are in seconds, sizes in bytes. */

import { get } from "./client";

export type Role = "inference" | "train" | "admin";

export interface Percentiles {
  count: number;
  p50: number;
  p95: number;
  p99: number;
}

/** About a second of the history. `decode`, `prefill`, `training` and `other` are device time within it. */
export interface Interval {
  number: number;
  at: number;
  seconds: number;
  decode: number;
  prefill: number;
  training: number;
  other: number;
  generated_tokens: number;
  prompt_tokens: number;
  running: number;
  waiting: number;
}

export interface Memory {
  weights: number;
  budget: number;
  rows: number;
  cached_prefixes: number;
  free_blocks: number;
  adapters: number;
  training: number;
}

/** The requests of a key, or for an adapter; `requests` and `generated_tokens` are of the last minute. */
export interface LoadLine {
  name: string;
  running: number;
  requests: number;
  generated_tokens: number;
}

export interface Load {
  /** Of all keys for an admin key, else of the own one; empty if the server needs none. */
  keys: LoadLine[];
  adapters: LoadLine[];
  /** Responses of the last minute, by HTTP status. */
  errors: Record<string, number>;
}

export interface TrainedAdapter {
  name: string;
  state: string;
  step: number;
  /** Unix time in seconds. */
  last_update: number | null;
}

export interface LessonLine {
  adapter: string;
  state: string;
  updates: number;
}

export interface TrainingShare {
  target: number;
  measured: number;
  adapters: TrainedAdapter[];
  /** The lesson that runs. */
  lesson: LessonLine | null;
}

export interface Stats {
  started_at: number;
  mode: string;
  /** The server's own command line; empty if the key may not know it. */
  command: string;
  state: "serving" | "paused" | "asleep" | "draining" | "dead";
  caller: { name: string; role: Role; required: boolean };
  models: { name: string; state: string }[];
  queue: { running: number; rows: number; waiting: number; held: number; limit: number };
  latency: { first_token: Percentiles | null; between_tokens: Percentiles | null };
  load: Load;
  memory: Memory;
  training: TrainingShare | null;
  /** What the server does about short memory, and why training waits. */
  notices: string[];
  /** Whether the server is a node of a cluster. */
  cluster: boolean;
  intervals: Interval[];
}

/** The figures of now, and the intervals after the one with number `after`; 0 asks for all that the server keeps. */
export const stats = (after: number): Promise<Stats> => get(`/v1/stats?after=${after}`);
