import type { Interval } from "../../api/stats";
import { Card } from "../../components/card";
import { Chart, type Line, WHOLE } from "../../components/chart";
import { number } from "../../format";
import { points, windowOf } from "./window";

interface Properties {
  intervals: readonly Interval[];
}

export const Speed = ({ intervals }: Properties) => (
  <Card title="Tokens a second">
    <OverTime
      title="Tokens a second in the last five minutes"
      intervals={intervals}
      lines={[
        { label: "Generated", color: "decode", filled: true, of: (each) => each.generated_tokens / each.seconds },
        { label: "Prompts", color: "prefill", of: (each) => each.prompt_tokens / each.seconds },
      ]}
    />
  </Card>
);

export const Sequences = ({ intervals }: Properties) => (
  <Card title="Answers at once">
    <OverTime
      title="Answers at once in the last five minutes"
      intervals={intervals}
      lines={[
        { label: "Answering", color: "decode", filled: true, of: (each) => each.running },
        { label: "Waiting", color: "waiting", of: (each) => each.waiting },
      ]}
    />
  </Card>
);

interface OverTimeProperties extends Properties {
  title: string;
  lines: readonly (Omit<Line, "values"> & { of: (interval: Interval) => number })[];
}

function OverTime({ title, intervals, lines }: OverTimeProperties) {
  const shown = points(intervals);
  return (
    <Chart
      title={title}
      overTime
      marks={WHOLE}
      x={shown.map((point) => point.at)}
      lines={lines.map(({ of, ...line }) => ({
        ...line,
        values: shown.map(({ interval }) => interval && of(interval)),
      }))}
      format={number}
      range={windowOf(intervals)}
    />
  );
}
