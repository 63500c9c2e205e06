import type { Stats } from "../../api/stats";
import { Card } from "../../components/card";
import { Table } from "../../components/table";

/** The base models of the server, if there are several. */
export const Models = ({ models }: Pick<Stats, "models">) => (
  <Card title="Base models" about="others are loaded when a request names them">
    <Table
      caption="Base models"
      rows={models}
      keyOf={(model) => model.name}
      columns={[
        { title: "Model", cell: (model) => model.name },
        { title: "State", cell: (model) => model.state },
      ]}
      empty="No base model."
    />
  </Card>
);
