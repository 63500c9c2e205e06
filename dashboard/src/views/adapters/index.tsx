/** Adapters and their versions: where each is, which requests get it, how versions compete, and what can be done. */

import type { Adapters } from "../../api/adapters";
import { Needs } from "../../components/action";
import { Figure } from "../../components/figure";
import { bytes, counted, number } from "../../format";
import { now } from "../../live/stats";
import { Checkpoints } from "./checkpoints";
import { Comparisons } from "./comparisons";
import { Load } from "./load";
import { useOverview } from "./overview";
import { Route } from "./route";
import { Versions } from "./versions";
import "../../style/learning.css";

export function AdaptersView({ rest }: { rest: readonly string[] }) {
  const { overview, why, again } = useOverview();
  if (overview === null || now.value === null) {
    return <p class="empty">{why || "Asking the server…"}</p>;
  }
  const { adapters, checkpoints, comparisons, trained } = overview;
  return (
    <>
      <Headline adapters={adapters} trained={trained} />
      <Needs needed="train" what="Changes" />
      <Load onDone={again} />
      <div class="cards one">
        <Versions overview={overview} selected={rest[0]} onDone={again} />
      </div>
      <div class="cards">
        <Route adapters={adapters} onDone={again} />
        <Comparisons overview={overview} comparisons={comparisons} onDone={again} />
      </div>
      <div class="cards one">
        <Checkpoints checkpoints={checkpoints} />
      </div>
    </>
  );
}

const Headline = ({ adapters, trained }: { adapters: Adapters; trained: readonly string[] }) => (
  <dl class="figures">
    <Figure label="Adapters" value={number(new Set(adapters.data.map((version) => version.name)).size)}>
      {counted(adapters.data.length, "version")}
    </Figure>
    <Figure label="Ready on the device" value={number(adapters.slots.used)}>
      of {number(adapters.slots.total)} at most; {number(adapters.slots.pinned)} in use now
    </Figure>
    <Figure label="Memory for them" value={bytes(adapters.bank_bytes)}>
      on the device
    </Figure>
    <Figure label="In training" value={number(trained.length)}>
      {trained.join(", ") || "none"}
    </Figure>
  </dl>
);
