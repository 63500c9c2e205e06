/** `GET /v1/stats`: what the server does now, and did in the last minutes. Times are in seconds, sizes in bytes. */

import { get } from "./client";
import type { Answers } from "./schema";

export type Stats = Answers["GET /v1/stats"];

/** About a second of the history. `decode`, `prefill`, `training` and `other` are device time within it. */
export type Interval = Stats["intervals"][number];

export type Percentiles = NonNullable<Stats["latency"]["first_token"]>;

export type Role = Stats["caller"]["role"];

export type Memory = Stats["memory"];

export type Load = Stats["load"];

export type LoadLine = Load["keys"][number];

export type TrainingShare = NonNullable<Stats["training"]>;

export type TrainedAdapter = TrainingShare["adapters"][number];

/** The figures of now, and the intervals after the one with number `after`; 0 asks for all that the server keeps. */
export const stats = (after: number): Promise<Stats> => get(`/v1/stats?after=${after}`);
