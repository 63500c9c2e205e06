/** Adapters and their versions: where they are, who gets them, and how they compete. */

import { get, post, remove } from "./client";

export interface AdapterVersion {
  /** `name@version`. */
  id: string;
  name: string;
  live: boolean;
  residence: "slot" | "copy" | "file";
  root: string;
  rank: number;
  bytes: number;
  created: number;
  /** Requests under way that use it. */
  leases: number;
  /** Requests that it got since the server started. */
  requests: number;
  /** Its share of the requests that name no adapter, 0 to 1. */
  unnamed_share: number;
  checkpoint: string | null;
}

export interface Adapters {
  data: AdapterVersion[];
  /** The shares of the requests that name no adapter, by selector. */
  route: Record<string, number>;
  /** Whether there is a change of the shares to undo. */
  route_changed: boolean;
  /** Requests that the base models answered without an adapter, since the server started. */
  base_requests: number;
  slots: { total: number; used: number; pinned: number };
  bank_bytes: number;
}

export interface Checkpoint {
  name: string;
  lora_adapter: string;
  step: number;
  created: number;
  tags: string[];
  metrics: Record<string, number | null>;
}

export interface Comparison {
  lora_adapter: string;
  live: string;
  candidate: string;
  verdict: "running" | "promoted" | "withdrawn" | "no_difference" | "stopped" | "failed";
  reason: string;
  share: number;
  /** Requests that each of them got. */
  live_requests: number;
  candidate_requests: number;
  live_rewards: number;
  candidate_rewards: number;
  live_mean: number | null;
  candidate_mean: number | null;
  p_better: number;
  p_worse: number;
}

const list = <T>(path: string): Promise<T[]> => get<{ data: T[] }>(path).then((answer) => answer.data);

export const adapters = (): Promise<Adapters> => get("/v1/adapters");

export const checkpoints = (): Promise<Checkpoint[]> => list("/v1/checkpoints");

export const comparisons = (): Promise<Comparison[]> => list("/v1/training/compare");

/** `path`: a folder below those that the operator allows. The name means the new version from then on. */
export const load = (name: string, path: string): Promise<AdapterVersion> =>
  post("/v1/load_lora_adapter", { lora_name: name, lora_path: path, load_inplace: true });

export const unload = (selector: string): Promise<unknown> => remove(`/v1/adapters/${encodeURIComponent(selector)}`);

/** Splits the requests that name no adapter in proportion to the weights. */
export const setRoute = (weights: Record<string, number>): Promise<unknown> => post("/v1/adapters/route", { weights });

/** Makes the version before the live one live again; without a name, undoes the last change of the route. */
export const rollBack = (name?: string): Promise<{ lora_adapter: string }> =>
  post("/v1/adapters/rollback", name ? { lora_name: name } : {});

export const save = (selector: string, tag: string): Promise<Checkpoint> =>
  post("/v1/training/checkpoint", { lora_name: selector, ...(tag && { checkpoint_name: tag }) });

export const compare = (adapter: string, candidate: string, share: number): Promise<Comparison> =>
  post("/v1/training/compare", { lora_adapter: adapter, candidate, share });

export const stopComparing = (adapter: string): Promise<Comparison> =>
  post("/v1/training/compare/stop", { lora_adapter: adapter });
