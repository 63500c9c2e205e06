/** `/v1/training/trajectories`: the groups of answers that were collected, and one of them in full. */

import { get } from "./client";

export const FATES = ["waiting", "scored", "training", "trained", "dropped"] as const;

export type Fate = (typeof FATES)[number];

export interface GroupRow {
  /** Grows with the time of arrival, until the server is started again. */
  number: number;
  group_id: string;
  /** The beginning of the prompt. */
  prompt: string;
  samples: number;
  /** The mean of the samples that have one. */
  reward: number | null;
  lora_adapter: string;
  lora_versions: string[];
  fate: Fate;
  /** Why it was dropped. */
  reason: string;
  signal: "rewards" | "late_feedback" | "preferences" | "corrections";
  created: string;
}

export interface GroupPage {
  /** Newest first. */
  data: GroupRow[];
  has_more: boolean;
}

export interface Token {
  text: string;
  logprob: number | null;
  advantage: number | null;
  /** It was not drawn, such as the result of a tool. */
  context?: boolean;
}

export interface Edited {
  text: string;
  signal: "preferences" | "corrections";
  fate: Fate;
  reason: string;
}

export interface Turn {
  trajectory_id: string;
  lora_version: string | null;
  /** What came between the turn before, or the group's prompt, and this answer. */
  context: string;
  text: string;
  tokens: Token[];
  tokens_left_out: number;
  temperature: number;
  finish_reason: "stop" | "length" | null;
  thumbs_up: number;
  thumbs_down: number;
  edits: Edited[];
}

/** One answer, or an episode of several. `thumbs`: what feedback on it does now. */
export interface Sample {
  reward: number | null;
  advantage: number | null;
  fate: Fate;
  reason: string;
  thumbs: "count" | "count_late" | "nothing";
  turns: Turn[];
  turns_left_out: number;
}

export interface Group extends GroupRow {
  scoring_function: string | null;
  /** As the model got it. */
  full_prompt: string;
  prompt_tokens: number;
  members: Sample[];
}

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
