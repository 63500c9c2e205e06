/** `/v1/training`: its events. See the API's own pages at /docs. */

import type { History } from "./learning";

/** One event of `/v1/training/events`; `TrainingEvent` of the package lists the kinds. */
export type TrainingEvent<Data> = Omit<History["data"][number], "data"> & { data: Data };

/** For `follow` of live/events.ts. */
export const TRAINING_EVENTS = "/v1/training/events";
