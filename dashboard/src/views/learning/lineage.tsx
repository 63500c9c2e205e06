import { rollBackTraining } from "../../api/learning";
import { Card } from "../../components/card";
import { Confirmed } from "../../components/confirmed";
import { Table } from "../../components/table";
import { clock, number } from "../../format";
import type { Version } from "./course";
import { Tree } from "./tree";

interface Properties {
  adapter: string;
  versions: readonly Version[];
  /** The best version, by name. */
  best: string | null;
}

/** Which version was made of which, what became of each, and the way back to those that have a checkpoint. */
export const Lineage = ({ adapter, versions, best }: Properties) => (
  <Card title="Versions" about="newest first; each was trained from the one that its line leads to">
    <Tree versions={versions} best={best} />
    <Table
      caption="Versions of the adapter"
      rows={[...versions].reverse()}
      keyOf={(version) => version.name}
      columns={[
        { title: "Version", cell: (version) => version.name },
        { title: "State", cell: (version) => <State version={version} best={version.name === best} /> },
        { title: "Trained from", cell: (version) => version.parent ?? "–" },
        { title: "Made", cell: (version) => clock(Date.parse(version.at) / 1000) },
        { title: "Reward", cell: (version) => figure(version.reward), numeric: true },
        { title: "Evaluation", cell: (version) => evaluation(version), numeric: true },
        { title: "Checkpoint", cell: (version) => <Saved adapter={adapter} version={version} /> },
      ]}
      empty="No version yet. The first update makes one."
    />
  </Card>
);

const figure = (value: number | null): string => (value === null ? "–" : number(value));

const evaluation = ({ evaluation }: Version): string =>
  evaluation ? `${number(evaluation.mean)} (${number(evaluation.low)} to ${number(evaluation.high)})` : "–";

const State = ({ version, best }: { version: Version; best: boolean }) => (
  <>
    <span class={`tag ${version.fate.replaceAll(" ", "-")}`}>{version.fate}</span>
    {best && <span class="tag best">best</span>}
  </>
);

function Saved({ adapter, version }: { adapter: string; version: Version }) {
  const { checkpoint, fate, name, tags } = version;
  if (checkpoint === null) {
    return <>–</>;
  }
  return (
    <>
      {[checkpoint, ...tags].join(", ")}{" "}
      {fate !== "live" && (
        <Confirmed
          needs="train"
          label={`Roll back to ${name}`}
          title={`Roll back to ${name}?`}
          run={() => rollBackTraining(adapter, checkpoint)}
          done={`${name} is live again.`}
        >
          Requests for {adapter} get {name} from now on, and training continues from it. Versions made since stay on the
          disk if they were saved. Requests under way end on the version that they began with.
        </Confirmed>
      )}
    </>
  );
}
