import type { Load as Asked, LoadLine } from "../../api/stats";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { number } from "../../format";

/** Who asks for how much, by key and by adapter. */
export const Load = ({ load }: { load: Asked }) => (
  <>
    {load.keys.length > 0 && <Lines title="By key" of="Key" lines={load.keys} />}
    {load.adapters.length > 0 && <Lines title="By adapter" of="Adapter" lines={load.adapters} />}
  </>
);

const Lines = ({ title, of, lines }: { title: string; of: string; lines: readonly LoadLine[] }) => (
  <Card title={title} about="the last minute">
    <Table
      caption={title}
      rows={lines}
      keyOf={(line) => line.name}
      columns={[
        { title: of, cell: (line) => line.name },
        { title: "Under way", cell: (line) => number(line.running), numeric: true },
        { title: "Requests a minute", cell: (line) => number(line.requests), numeric: true },
        { title: "Tokens a second", cell: (line) => number(line.generated_tokens / 60), numeric: true },
      ]}
      empty=""
    />
  </Card>
);
