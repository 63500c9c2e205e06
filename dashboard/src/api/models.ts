/** `/v1/models`: the names that requests may have. */

import { get } from "./client";

export interface Model {
  id: string;
  /** Of a base model, its own name, which its other names have too. */
  root: string;
  /** Of an adapter, its base model; null for a base model. */
  parent: string | null;
  /** Of an adapter, its live version; not there if its base model was not loaded yet. */
  version?: number;
  /** Of a base model. */
  state?: string;
}

/** The first one is the first base model. */
export const models = (): Promise<Model[]> => get<{ data: Model[] }>("/v1/models").then((answer) => answer.data);
