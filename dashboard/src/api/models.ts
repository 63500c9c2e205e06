/** `/v1/models`: the names that requests may have. */

import { get } from "./client";
import type { Answers } from "./schema";

type ModelList = Answers["GET /v1/models"];

/** The name of a base model or an adapter. */
export type Model = ModelList["data"][number];

/** The first one is the first base model. */
export const models = (): Promise<Model[]> => get<ModelList>("/v1/models").then(({ data }) => data);
