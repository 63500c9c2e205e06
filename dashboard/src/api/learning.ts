/** `/v1/training` of one adapter: its state, its history, and what can be done to it. */

import { get, post } from "./client";
import type { TrainingEvent } from "./training";

export interface Evaluation {
  lora_adapter: string;
  mean: number;
  low: number;
  high: number;
  answers: number;
}

export interface TrainingState {
  state: "disabled" | "idle" | "running" | "updating" | "paused";
  /** Why no automatic updates are made: "asked", or in words. */
  pause_reason: string | null;
  lora_adapter: string | null;
  live_lora: string | null;
  best_lora: string | null;
  /** What people should change, because nearly all answers earn the same; empty if there is nothing. */
  advice: string;
  step: number;
  trajectories_collected: number;
  trajectories_waiting: number;
  groups_ready: number;
  evaluation: Evaluation | null;
  rollouts: { environment: string; state: string; last_failure: string } | null;
  drops: Record<string, number>;
  skips: Record<string, number>;
}

/** What has happened since the run began, oldest first. The stream of events continues after `last_event_id`. */
export interface History {
  data: TrainingEvent[];
  truncated: boolean;
  last_event_id: string;
}

/** Figures of an update that the view shows; the server sends no others. */
export const METRICS = [
  "reward_mean",
  "reward_std",
  "trajectories",
  "loss",
  "kl",
  "entropy",
  "clip_fraction",
  "staleness",
  "completion_tokens",
  "eval_mean",
  "eval_low",
  "eval_high",
] as const;

export type Metric = (typeof METRICS)[number];

/** What was learnt from one source; see the route's description at /docs. */
export interface Source {
  source: string;
  arrived: number;
  waiting: number;
  trained: number;
  /** Counts by reason. */
  dropped: Record<string, number>;
  updates: number;
  gradient_share: number;
  reward_change: number | null;
  evaluation_change: number | null;
}

/** What an adapter was taught by since the server started. */
export interface Report {
  opinions: number;
  people: number;
  sources: readonly Source[];
}

export interface Schedule {
  mode: string;
  training_time_share: number;
  max_decode_stall_ms: number;
  measured: { training_share: number; largest_decode_gap_ms: number };
}

const LIMIT = 1000;

/** Without a name, that of the default adapter. */
export const trainingState = (adapter?: string): Promise<TrainingState> =>
  get(`/v1/training/status${adapter ? `?lora_adapter=${encodeURIComponent(adapter)}` : ""}`);

export const trainingHistory = (adapter: string): Promise<History> => {
  const wanted = METRICS.map((name) => `&metric=${name}`).join("");
  return get(`/v1/training/history?lora_adapter=${encodeURIComponent(adapter)}&limit=${LIMIT}${wanted}`);
};

export const trainingReport = (adapter: string): Promise<Report> =>
  get(`/v1/training/report?lora_adapter=${encodeURIComponent(adapter)}`);

export const pauseTraining = (adapter: string): Promise<unknown> =>
  post("/v1/training/pause", { lora_adapter: adapter });

export const resumeTraining = (adapter: string): Promise<unknown> =>
  post("/v1/training/resume", { lora_adapter: adapter });

/** Trains this adapter too. */
export const startTraining = (adapter: string): Promise<unknown> =>
  post("/v1/training/start", { lora_adapter: adapter });

/** What it has learnt is saved, and its live version stays live. */
export const stopTraining = (adapter: string): Promise<unknown> => post("/v1/training/stop", { lora_adapter: adapter });

/** `to`: the name or a tag of a checkpoint; without it, the best version. */
export const rollBackTraining = (adapter: string, to?: string): Promise<TrainingState> =>
  post("/v1/training/rollback", { lora_adapter: adapter, ...(to && { to }) });

export const schedule = (): Promise<Schedule> => get("/v1/training/schedule");

export const setSchedule = (training_time_share: number): Promise<Schedule> =>
  post("/v1/training/schedule", { training_time_share });
