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

export interface Stats {
  started_at: number;
  mode: string;
  state: "serving" | "paused" | "asleep" | "draining" | "dead";
  caller: { name: string; role: Role; required: boolean };
  models: { name: string; state: string }[];
  queue: { running: number; rows: number; waiting: number; held: number; limit: number };
  latency: { first_token: Percentiles | null; between_tokens: Percentiles | null };
  memory: Memory;
  training: { target: number; measured: number; adapters: { name: string; state: string; step: number }[] } | null;
  /** What the server does about short memory, and why training waits. */
  notices: string[];
  /** Whether the server is a node of a cluster. */
  cluster: boolean;
  intervals: Interval[];
}

/** The figures of now, and the intervals after the one with number `after`; 0 asks for all that the server keeps. */
export const stats = (after: number): Promise<Stats> => get(`/v1/stats?after=${after}`);
