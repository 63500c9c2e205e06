/** `/v1/training`: its events. See the API's own pages at /docs. */

/** One event of `/v1/training/events`, whose kinds `docs/learning.md` lists. `at`: an ISO time. */
export interface TrainingEvent<Data = Record<string, unknown>> {
  kind: string;
  at: string;
  data: Data;
}

/** For `follow` of live/events.ts. */
export const TRAINING_EVENTS = "/v1/training/events";
