import type { AdapterVersion, Checkpoint } from "../../api/adapters";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { bytes, number, percent } from "../../format";
import { link } from "../../router";
import { evaluationOf } from "./checkpoints";
import { Details } from "./details";
import type { Overview } from "./overview";

interface Properties {
  overview: Overview;
  /** The id of the version that is opened, if there is one. */
  selected: string | undefined;
  onDone: () => void;
}

export function Versions({ overview, selected, onDone }: Properties) {
  const { adapters, checkpoints } = overview;
  const opened = adapters.data.find((version) => version.id === selected);
  return (
    <>
      <Card title="Versions" about="open one to publish, save or compare it">
        <Table
          caption="Versions of all adapters"
          rows={[...adapters.data].sort(newestFirst)}
          keyOf={(version) => version.id}
          onOpen={(version) => {
            location.hash = link("adapters", version.id);
          }}
          columns={[
            { title: "Version", cell: (version) => version.id },
            { title: "State", cell: (version) => <State version={version} trained={overview.trained} /> },
            { title: "Where", cell: (version) => WHERE[version.residence] },
            { title: "Under way", cell: (version) => number(version.leases), numeric: true },
            { title: "Requests", cell: (version) => number(version.requests), numeric: true },
            { title: "Share of unnamed", cell: (version) => share(version.unnamed_share), numeric: true },
            { title: "Reward", cell: (version) => reward(version, checkpoints), numeric: true },
            { title: "Rank", cell: (version) => number(version.rank), numeric: true },
            { title: "Size", cell: (version) => bytes(version.bytes), numeric: true },
          ]}
          empty="No adapter yet. Load one, or train one: the view Learning says how."
        />
      </Card>
      {opened && <Details key={opened.id} version={opened} overview={overview} onDone={onDone} />}
    </>
  );
}

const newestFirst = (one: AdapterVersion, other: AdapterVersion): number =>
  one.name.localeCompare(other.name) || versionOf(other) - versionOf(one);

const versionOf = ({ id }: AdapterVersion): number => Number(id.slice(id.lastIndexOf("@") + 1));

export const WHERE = { slot: "on the device", copy: "in memory", file: "on disk" } as const;

const State = ({ version, trained }: { version: AdapterVersion; trained: readonly string[] }) => (
  <>
    {version.live && <span class="tag live">live</span>}
    {version.live && trained.includes(version.name) && <span class="tag">learns</span>}
    {version.checkpoint && <span class="tag">saved</span>}
  </>
);

const share = (value: number): string => (value ? percent(value) : "–");

/** The mean reward that is kept with its checkpoint: that of its evaluation, or of the update that made it. */
export function reward(version: AdapterVersion, checkpoints: readonly Checkpoint[]): string {
  const saved = checkpoints.find((each) => each.lora_adapter === version.id);
  const mean = saved && (evaluationOf(saved) ?? saved.metrics.reward_mean);
  return mean == null ? "–" : number(mean);
}
