import type { Cluster } from "../../api/cluster";
import { Figure } from "../../components/figure";
import { number } from "../../format";

/** The figures of all nodes together, and what went wrong. */
export function Headline({ cluster }: { cluster: Cluster }) {
  const { nodes } = cluster;
  const routes = isHead(cluster);
  const counted = (value: number): string => (routes ? number(value) : "–");
  const sum = (of: "outstanding_tokens" | "requests"): number => nodes.reduce((total, node) => total + node[of], 0);
  return (
    <dl class="figures">
      <Figure label="Nodes ready" value={number(nodes.filter((node) => node.ready).length)}>
        of {number(nodes.length)} that are here
      </Figure>
      <Figure label="To do" value={number(sum("outstanding_tokens"))}>
        tokens of requests under way
      </Figure>
      <Figure label="Requests" value={counted(sum("requests"))}>
        {routes ? "to the nodes that are here" : BY_HEAD}
      </Figure>
      <Figure label="To learn" value={number(Object.values(cluster.waiting).reduce((total, each) => total + each, 0))}>
        requests that wait for a trainer
      </Figure>
      <Figure label="Retried" value={counted(cluster.requests_retried)}>
        {routes ? "begun anew on another node" : BY_HEAD}
      </Figure>
      <Figure label="Streams broken" value={counted(cluster.streams_broken)}>
        {routes ? "ended with an error" : BY_HEAD}
      </Figure>
      <Figure label="Nodes lost" value={number(cluster.nodes_lost)}>
        since this one started
      </Figure>
    </dl>
  );
}

const BY_HEAD = "counted by the head";

/** Whether the node that answers is the one that routes requests. */
export const isHead = ({ node, nodes }: Cluster): boolean =>
  nodes.some((each) => each.id === node && each.role === "head");
