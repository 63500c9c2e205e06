/** `GET /v1/cluster`: the nodes that serve one base model together, as this server sees them. */

import { get } from "./client";

export interface ClusterNode {
  id: string;
  role: string;
  /** Where the other nodes reach it; empty if it has no HTTP server. */
  url: string;
  /** The shared versions that it can serve, as `name@version`. */
  holds: string[];
  outstanding_tokens: number;
  ready: boolean;
  /** Sent to it by the head; 0 in the answers of other nodes. */
  requests: number;
}

export interface SharedVersion {
  name: string;
  version: number;
  bytes: number;
  live: boolean;
}

export interface Cluster {
  /** The id of the node that answers. */
  node: string;
  /** Whether it is connected to NATS. */
  connected: boolean;
  nodes: ClusterNode[];
  versions: SharedVersion[];
  /** Versions that the node that answers cannot serve, with the reason. */
  unusable: Record<string, string>;
  /** Requests whose answers wait for the trainer of an adapter, by its name. */
  waiting: Record<string, number>;
  nodes_lost: number;
  requests_retried: number;
  streams_broken: number;
}

export const cluster = (): Promise<Cluster> => get("/v1/cluster");

export const idOf = ({ name, version }: SharedVersion): string => `${name}@${version}`;
