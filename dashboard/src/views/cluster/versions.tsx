import { type Cluster, idOf, type SharedVersion } from "../../api/cluster";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { bytes, number } from "../../format";

/** The adapter versions that the nodes share, and how many of those that serve hold each. */
export function Versions({ cluster }: { cluster: Cluster }) {
  const serving = cluster.nodes.filter((node) => node.ready);
  const holders = (version: SharedVersion): number =>
    serving.filter((node) => node.holds.includes(idOf(version))).length;
  return (
    <Card title="Shared adapter versions" about="published to every node">
      <Table
        caption="Shared adapter versions"
        rows={[...cluster.versions].sort(newestFirst)}
        keyOf={idOf}
        columns={[
          { title: "Version", cell: idOf },
          { title: "State", cell: (version) => version.live && <span class="tag live">live</span> },
          {
            title: "Held by",
            cell: (version) => `${number(holders(version))} of ${number(serving.length)} nodes`,
            numeric: true,
          },
          { title: "Size", cell: (version) => bytes(version.bytes), numeric: true },
        ]}
        empty="No adapter is shared yet. The trainer of a cluster publishes versions; every node then holds them."
      />
    </Card>
  );
}

const newestFirst = (one: SharedVersion, other: SharedVersion): number =>
  one.name.localeCompare(other.name) || other.version - one.version;

/** Versions that this node cannot serve; the others may. */
export function Unusable({ reasons }: { reasons: Readonly<Record<string, string>> }) {
  const versions = Object.entries(reasons);
  return versions.length > 0 ? (
    <Card title="Versions that this node cannot serve" about="with the reason of each">
      <dl class="reasons">
        {versions.map(([version, reason]) => (
          <div key={version}>
            <dt>{version}</dt>
            <dd>{reason}</dd>
          </div>
        ))}
      </dl>
    </Card>
  ) : null;
}
