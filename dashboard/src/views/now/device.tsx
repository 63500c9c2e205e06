import type { Interval } from "../../api/stats";
import { Card } from "../../components/card";
import { Strip } from "../../components/strip";
import { windowOf } from "./window";

const DECODE = { label: "Decode", color: "decode", of: (each: Interval) => each.decode };
const PREFILL = { label: "Prefill", color: "prefill", of: (each: Interval) => each.prefill };
const TRAINING = { label: "Training", color: "training", of: (each: Interval) => each.training };
const OTHER = { label: "Adapters and loading", color: "adapters", of: (each: Interval) => each.other };

/** What the device did in each second of the last minutes. */
export function Device({ intervals, trains }: { intervals: readonly Interval[]; trains: boolean }) {
  const kinds = [DECODE, PREFILL, ...(trains ? [TRAINING] : []), OTHER];
  return (
    <Card title="Device time" about="share of each second">
      <Strip
        title="Device time in the last five minutes"
        kinds={kinds}
        rest="Idle"
        columns={intervals.map((each) => ({
          at: each.at,
          seconds: each.seconds,
          parts: kinds.map((kind) => kind.of(each)),
        }))}
        range={windowOf(intervals)}
      />
    </Card>
  );
}
