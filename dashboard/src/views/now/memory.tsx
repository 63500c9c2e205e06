import type { Memory as Held } from "../../api/stats";
import { Bar } from "../../components/bar";
import { Card } from "../../components/card";
import { bytes } from "../../format";

/** Who holds the device's memory. Weights are beside the budget; all others share it. */
export function Memory({ memory, trains }: { memory: Held; trains: boolean }) {
  const { weights, budget, rows, cached_prefixes, adapters, training } = memory;
  const parts = [
    { label: "Weights", value: weights, color: "weights" },
    { label: "Keys and values", value: rows, color: "decode" },
    { label: "Prefix cache", value: cached_prefixes, color: "prefill" },
    { label: "Adapters", value: adapters, color: "adapters" },
    ...(trains ? [{ label: "Training", value: training, color: "training" }] : []),
    { label: "Free", value: Math.max(0, budget - rows - cached_prefixes - adapters - training), color: "idle" },
  ];
  return (
    <Card title="Memory" about={`weights, and ${bytes(budget)} for everything else`}>
      <Bar title="Memory" parts={parts} format={bytes} />
    </Card>
  );
}
