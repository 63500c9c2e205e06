/** What people say about answers: thumbs, and corrections. `user`: who says so; each person counts once. */

import { post } from "./client";
import type { Answers } from "./schema";

export type Rated = Answers["POST /v1/training/feedback"];

/** `score`: 1 is good, 0 is bad. */
export const rate = (trajectory_id: string, score: 0 | 1, user?: string): Promise<Rated> =>
  post("/v1/training/feedback", { trajectory_id, score, ...(user && { user }) });

/** `correction`: what the answer should have been. */
export const correct = (trajectory_id: string, correction: string, user?: string): Promise<unknown> =>
  post("/v1/training/preference", { trajectory_id, correction, ...(user && { user }) });
