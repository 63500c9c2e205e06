import { useState } from "preact/hooks";
import { type WhyAnswer, type WhyPush, whyAnswer } from "../../api/why";
import { Action } from "../../components/action";
import { Table, type TableColumn } from "../../components/table";
import { counted, number, percent } from "../../format";
import { Said } from "./said";

/** What pushed an answer most, once it is asked for: that takes a backward pass for each sample. */
export function Pushed({ id, name }: { id: string; name: string }) {
  const [found, setFound] = useState<WhyAnswer | null>(null);
  return found === null ? (
    <Action needs="train" run={() => whyAnswer(id).then(setFound)}>
      Why {name}?
    </Action>
  ) : (
    <>
      <Ranked title="Pushed towards it" rows={found.towards} />
      <Ranked title="Pushed away from it" rows={found.away} />
      <p class="about">
        Of {found.version}; {number(found.samples_looked_at)} of {counted(found.samples_total, "sample")} were looked
        at. An estimate at the weights of {found.weights}: what the answer would be without a sample, only a rebuild
        without it shows.
      </p>
    </>
  );
}

const Ranked = ({ title, rows }: { title: string; rows: readonly WhyPush[] }) => (
  <>
    <h3>{title}</h3>
    <Table caption={title} rows={rows} keyOf={(row) => `${rows.indexOf(row)}`} columns={COLUMNS} empty="Nothing." />
  </>
);

const COLUMNS: readonly TableColumn<WhyPush>[] = [
  { title: "Answer", cell: (row) => <Said sample={row} /> },
  { title: "Nats", cell: (row) => signed(row.score), numeric: true },
  { title: "Likeness", cell: (row) => signed(row.cosine), numeric: true },
  { title: "Update", cell: (row) => row.update, numeric: true },
  { title: "Reward", cell: (row) => (row.reward === null ? "–" : number(row.reward)), numeric: true },
  { title: "Share", cell: (row) => percent(row.share), numeric: true },
];

const signed = (value: number | null): string =>
  value === null ? "–" : `${value > 0 ? "+" : ""}${value.toPrecision(2)}`;
