/** What people say about answers: thumbs, and corrections. `user`: who says so; each person counts once. */

import { post } from "./client";

export interface Rated {
  /** The mean of all people. */
  reward: number;
  people: number;
  /** The answer had been dropped, and is learnt from all the same. */
  late: boolean;
}

export interface Corrected {
  waiting: number;
  /** So many make an update. */
  wanted: number;
  is_new: boolean;
}

/** `score`: 1 is good, 0 is bad. */
export const rate = (trajectory_id: string, score: 0 | 1, user?: string): Promise<Rated> =>
  post("/v1/training/feedback", { trajectory_id, score, ...(user && { user }) });

/** `correction`: what the answer should have been. */
export const correct = (trajectory_id: string, correction: string, user?: string): Promise<Corrected> =>
  post("/v1/training/preference", { trajectory_id, correction, ...(user && { user }) });
