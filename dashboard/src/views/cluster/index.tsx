/** The cluster that the server is a node of: who is there, what each has to do, and the versions that they share. */

import { cluster } from "../../api/cluster";
import { Banner } from "../../components/banner";
import { usePolled } from "../../live/polled";
import { now } from "../../live/stats";
import { AddNode, NoCluster } from "./empty";
import { Headline, isHead } from "./headline";
import { Nodes } from "./nodes";
import { Unusable, Versions } from "./versions";
import "../../style/learning.css";

const EVERY_MS = 1000;

export function ClusterView() {
  if (now.value === null) {
    return <p class="empty">Asking the server…</p>;
  }
  return now.value.cluster ? <Shown /> : <NoCluster />;
}

function Shown() {
  const { value, refused } = usePolled("cluster", cluster, EVERY_MS);
  if (value === null) {
    return <p class="empty">{refused?.message ?? "Asking the server…"}</p>;
  }
  return (
    <>
      {!value.connected && (
        <Banner>
          This node has no connection to NATS, so what it says of other nodes and of versions may be old. It connects
          again by itself.
        </Banner>
      )}
      <Headline cluster={value} />
      <div class="cards one">
        <Nodes cluster={value} />
        {value.nodes.length === 1 && isHead(value) && <AddNode />}
        <Versions cluster={value} />
        <Unusable reasons={value.unusable} />
      </div>
    </>
  );
}
