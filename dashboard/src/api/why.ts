/** `/v1/training/why`: what a version learnt from, and what pushed an answer. */

import { get, post } from "./client";
import type { Answers } from "./schema";

export type WhyVersion = Answers["GET /v1/training/why"];

export type WhyUpdate = WhyVersion["updates"][number];

export type WhySample = WhyUpdate["samples"][number];

export type WhyAnswer = Answers["POST /v1/training/why"];

export type WhyPush = WhyAnswer["towards"][number];

/** `update`: the number of the one update that is wanted, with its answers. */
export function whyVersion(version: string, update?: number): Promise<WhyVersion> {
  const query = new URLSearchParams({ version, ...(update !== undefined && { update: `${update}` }) });
  return get(`/v1/training/why?${query}`);
}

export const whyAnswer = (trajectory_id: string): Promise<WhyAnswer> => post("/v1/training/why", { trajectory_id });
