/** `/v1/training` of one adapter: its state, its history, and what can be done to it. */

import { get, post } from "./client";
import type { Answers } from "./schema";

export type TrainingState = Answers["GET /v1/training/status"];

/** What has happened since the run began. The stream of events continues after `last_event_id`. */
export type History = Answers["GET /v1/training/history"];

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

/** What an adapter was taught by since the server started. */
export type Report = Answers["GET /v1/training/report"];

/** What was learnt from one source. */
export type Source = Report["sources"][number];

export type Schedule = Answers["GET /v1/training/schedule"];

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
