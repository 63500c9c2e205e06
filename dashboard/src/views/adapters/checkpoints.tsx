import type { Checkpoint } from "../../api/adapters";
import { may } from "../../components/action";
import { Card } from "../../components/card";
import { Table } from "../../components/table";
import { date, number } from "../../format";

/** The versions on disk. */
export const Checkpoints = ({ checkpoints }: { checkpoints: readonly Checkpoint[] }) => (
  <Card title="Checkpoints" about="versions on disk, newest first">
    <Table
      caption="Checkpoints"
      rows={[...checkpoints].reverse()}
      keyOf={(saved) => `${saved.lora_adapter} ${saved.name}`}
      columns={[
        { title: "Checkpoint", cell: (saved) => saved.name },
        { title: "Version", cell: (saved) => saved.lora_adapter },
        { title: "Names", cell: (saved) => saved.tags.join(", ") || "–" },
        { title: "Saved", cell: (saved) => date(saved.created) },
        { title: "Reward", cell: (saved) => figure(saved.metrics.reward_mean), numeric: true },
        { title: "Evaluation", cell: (saved) => figure(evaluationOf(saved)), numeric: true },
      ]}
      empty={
        may("train")
          ? "None yet. Training saves one every ten updates or five minutes; “Save” saves a version now."
          : "Checkpoints are shown to keys with the role train."
      }
    />
  </Card>
);

const figure = (value: number | null | undefined): string => (value == null ? "–" : number(value));

/** The mean reward of its evaluation. A checkpoint also has the last evaluation of an earlier version. */
export const evaluationOf = ({ lora_adapter: id, metrics }: Checkpoint): number | null | undefined =>
  id.endsWith(`@${metrics.eval_version}`) ? metrics.eval_mean : null;
