import type { TrainingShare } from "../../api/stats";
import { may } from "../../components/action";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { counted, number, percent } from "../../format";
import { link } from "../../router";

/** Which adapters learn, the lesson that runs, and what training gets of the device. */
export const Training = ({ training }: { training: TrainingShare }) => (
  <Card
    title="Training"
    about={`${percent(training.measured)} of the device now; ${percent(training.target)} beside requests`}
  >
    {training.lesson && (
      <p>
        A lesson teaches {training.lesson.adapter}: {counted(training.lesson.updates, "update")} made.{" "}
        {may("train") && <a href={link("teach")}>Look at it</a>}
      </p>
    )}
    <Table
      caption="Adapters that are trained"
      rows={training.adapters}
      keyOf={(adapter) => adapter.name}
      columns={[
        { title: "Adapter", cell: (adapter) => adapter.name },
        { title: "State", cell: (adapter) => STATES[adapter.state] ?? adapter.state },
        { title: "Updates", cell: (adapter) => number(adapter.step), numeric: true },
      ]}
      empty="No adapter is trained. The view Adapters starts one."
    />
  </Card>
);

const STATES: Readonly<Record<string, string>> = {
  idle: "waits for answers",
  running: "collects answers",
  updating: "makes an update",
  paused: "paused",
};
