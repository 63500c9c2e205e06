import type { Stats } from "../../api/stats";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { number, percent } from "../../format";

type Trained = NonNullable<Stats["training"]>;

/** Which adapters learn, and what training gets of the device. */
export const Training = ({ training }: { training: Trained }) => (
  <Card
    title="Training"
    about={`${percent(training.measured)} of the device now; ${percent(training.target)} beside requests`}
  >
    <Table
      caption="Adapters that are trained"
      rows={training.adapters}
      keyOf={(adapter) => adapter.name}
      columns={[
        { title: "Adapter", cell: (adapter) => adapter.name },
        { title: "State", cell: (adapter) => adapter.state },
        { title: "Updates", cell: (adapter) => number(adapter.step), numeric: true },
      ]}
      empty="No adapter is trained. POST /v1/training/start begins."
    />
  </Card>
);
