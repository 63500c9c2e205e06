import { type Cluster, type ClusterNode, idOf } from "../../api/cluster";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { number } from "../../format";
import { isHead } from "./headline";

/** Who is there, what each has to do, and which versions it can serve. */
export function Nodes({ cluster }: { cluster: Cluster }) {
  const versions = cluster.versions.map(idOf);
  const live = cluster.versions.filter((version) => version.live).map(idOf);
  const routes = isHead(cluster);
  return (
    <Card title="Nodes" about="each renews its entry every second">
      <Table
        caption="Nodes of the cluster"
        rows={cluster.nodes}
        keyOf={(node) => node.id}
        columns={[
          { title: "Node", cell: (node) => <Name node={node} isThis={node.id === cluster.node} /> },
          { title: "Role", cell: (node) => node.role },
          { title: "State", cell: (node) => <State node={node} live={live} /> },
          { title: "To do, tokens", cell: (node) => number(node.outstanding_tokens), numeric: true },
          { title: "Requests", cell: (node) => (routes ? number(node.requests) : "–"), numeric: true },
          { title: "Versions", cell: (node) => held(node, versions), numeric: true },
          { title: "Address", cell: (node) => node.url || "–" },
        ]}
        empty="No node has said anything yet."
      />
    </Card>
  );
}

const Name = ({ node, isThis }: { node: ClusterNode; isThis: boolean }) => (
  <>
    {node.id} {isThis && <span class="tag">this server</span>}
  </>
);

/** A node that serves and lacks a live version gets no requests for it. */
function State({ node, live }: { node: ClusterNode; live: readonly string[] }) {
  const missing = node.ready ? live.filter((version) => !node.holds.includes(version)) : [];
  return (
    <>
      <span class={node.ready ? "tag live" : "tag"}>{node.ready ? "ready" : "takes no requests"}</span>
      {missing.length > 0 && <span class="tag rolled-back">without {missing.join(", ")}</span>}
    </>
  );
}

const held = (node: ClusterNode, versions: readonly string[]): string =>
  `${number(versions.filter((version) => node.holds.includes(version)).length)} of ${number(versions.length)}`;
