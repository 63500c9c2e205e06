/** `GET /v1/cluster`: the nodes that serve one base model together, as this server sees them. */

import { get } from "./client";
import type { Answers } from "./schema";

export type Cluster = Answers["GET /v1/cluster"];

export type ClusterNode = Cluster["nodes"][number];

export type SharedVersion = Cluster["versions"][number];

export const cluster = (): Promise<Cluster> => get("/v1/cluster");

export const idOf = ({ name, version }: SharedVersion): string => `${name}@${version}`;
