/** Adapters and their versions: where they are, who gets them, and how they compete. */

import { get, post, remove } from "./client";
import type { Answers } from "./schema";

export type Adapters = Answers["GET /v1/adapters"];

export type AdapterVersion = Adapters["data"][number];

type CheckpointList = Answers["GET /v1/checkpoints"];

export type Checkpoint = CheckpointList["data"][number];

type ComparisonList = Answers["GET /v1/training/compare"];

export type Comparison = ComparisonList["data"][number];

export const adapters = (): Promise<Adapters> => get("/v1/adapters");

export const checkpoints = (): Promise<Checkpoint[]> => get<CheckpointList>("/v1/checkpoints").then(({ data }) => data);

export const comparisons = (): Promise<Comparison[]> =>
  get<ComparisonList>("/v1/training/compare").then(({ data }) => data);

/** `path`: a folder below those that the operator allows. The name means the new version from then on. */
export const load = (name: string, path: string): Promise<AdapterVersion> =>
  post("/v1/load_lora_adapter", { lora_name: name, lora_path: path, load_inplace: true });

export const unload = (selector: string): Promise<unknown> => remove(`/v1/adapters/${encodeURIComponent(selector)}`);

/** Splits the requests that name no adapter in proportion to the weights. */
export const setRoute = (weights: Record<string, number>): Promise<unknown> => post("/v1/adapters/route", { weights });

/** Makes the version before the live one live again; without a name, undoes the last change of the route. */
export const rollBack = (name?: string): Promise<unknown> =>
  post("/v1/adapters/rollback", name ? { lora_name: name } : {});

export const save = (selector: string, tag: string): Promise<Checkpoint> =>
  post("/v1/training/checkpoint", { lora_name: selector, ...(tag && { checkpoint_name: tag }) });

export const compare = (adapter: string, candidate: string, share: number): Promise<Comparison> =>
  post("/v1/training/compare", { lora_adapter: adapter, candidate, share });

export const stopComparing = (adapter: string): Promise<Comparison> =>
  post("/v1/training/compare/stop", { lora_adapter: adapter });
