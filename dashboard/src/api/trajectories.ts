/** `/v1/training/trajectories`: the groups of answers that were collected, and one of them in full. */

import { get } from "./client";
import type { Answers } from "./schema";

/** A page of the list, newest groups first. */
export type GroupPage = Answers["GET /v1/training/trajectories"];

export type GroupRow = GroupPage["data"][number];

export type Fate = GroupRow["fate"];

export const FATES: readonly Fate[] = ["waiting", "scored", "training", "trained", "dropped"];

export type Group = Answers["GET /v1/training/trajectories/{group_id}"];

/** One answer, or an episode of several. */
export type Sample = Group["members"][number];

export type Turn = Sample["turns"][number];

export type Token = Turn["tokens"][number];

/** What a person wrote in place of an answer. */
export type Edited = Turn["edits"][number];

/** Names and values of the route's query. */
export type Filters = Partial<Record<"lora_adapter" | "lora_version" | "fate" | "min_reward" | "max_reward", string>>;

/** `after`: the number of the last group of the page before. */
export function groups(filters: Filters, limit: number, after?: number): Promise<GroupPage> {
  const query = new URLSearchParams({ ...filters, limit: `${limit}` });
  if (after !== undefined) {
    query.set("after", `${after}`);
  }
  return get(`/v1/training/trajectories?${query}`);
}

export const group = (id: string): Promise<Group> => get(`/v1/training/trajectories/${encodeURIComponent(id)}`);
