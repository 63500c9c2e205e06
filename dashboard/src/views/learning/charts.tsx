import type { Metric } from "../../api/learning";
import { Card } from "../../components/card";
import { Chart, type Line } from "../../components/chart";
import { number, percent } from "../../format";
import type { Course, Evaluated, Update } from "./course";

/** Of a normal distribution, the standard errors on either side that 95 % are within. */
const INTERVAL = 1.96;

export function Charts({ updates, evaluations }: Pick<Course, "updates" | "evaluations">) {
  return (
    <>
      <div class="cards">
        <Reward updates={updates} />
        <Evaluation evaluations={evaluations} />
      </div>
      <div class="cards small">
        {FIGURES.map((figure) => (
          <OfUpdates key={figure.title} updates={updates} {...figure} />
        ))}
      </div>
    </>
  );
}

function Reward({ updates }: Pick<Course, "updates">) {
  const spread = (side: number) => (update: Update) => {
    const { reward_mean: mean, reward_std: deviation, trajectories } = update.metrics;
    return mean == null || deviation == null || !trajectories
      ? null
      : mean + (side * INTERVAL * deviation) / Math.sqrt(trajectories);
  };
  return (
    <Card title="Reward" about="mean of an update's answers, with its 95 % interval">
      <OverUpdates
        title="Mean reward over updates, with its 95 % interval"
        x={updates.map((update) => update.number)}
        lines={[
          { label: "Mean", color: "decode", values: updates.map((update) => update.metrics.reward_mean ?? null) },
          { label: "Low", color: "quiet", faint: true, values: updates.map(spread(-1)) },
          { label: "High", color: "quiet", faint: true, values: updates.map(spread(1)) },
        ]}
        between={[1, 2]}
      />
    </Card>
  );
}

function Evaluation({ evaluations }: Pick<Course, "evaluations">) {
  const line = (of: (each: Evaluated) => number) => evaluations.map(of);
  return (
    <Card title="Evaluation" about="mean reward on held-out tasks, with its 95 % interval">
      {evaluations.length === 0 ? (
        <p class="empty">
          No evaluation yet. A server with <code>--eval-tasks FILE --eval-every 10</code> evaluates every tenth update
          on tasks that are never trained on.
        </p>
      ) : (
        <OverUpdates
          title="Mean reward on the held-out tasks, with its 95 % interval"
          x={evaluations.map((each) => each.update)}
          lines={[
            { label: "Mean", color: "prefill", values: line((each) => each.mean) },
            { label: "Low", color: "quiet", faint: true, values: line((each) => each.low) },
            { label: "High", color: "quiet", faint: true, values: line((each) => each.high) },
          ]}
          between={[1, 2]}
        />
      )}
    </Card>
  );
}

interface Figure {
  title: string;
  about: string;
  metric: Metric;
  color: string;
  format?: (value: number) => string;
}

const FIGURES: readonly Figure[] = [
  { title: "Loss", about: "of the update", metric: "loss", color: "decode" },
  { title: "KL", about: "from the base model, nats a token", metric: "kl", color: "training" },
  { title: "Entropy", about: "nats a token", metric: "entropy", color: "adapters" },
  { title: "Clipped", about: "share of tokens", metric: "clip_fraction", color: "waiting", format: percent },
  { title: "Staleness", about: "versions behind", metric: "staleness", color: "weights" },
  { title: "Length", about: "tokens of an answer", metric: "completion_tokens", color: "prefill" },
];

const OfUpdates = ({ updates, title, about, metric, color, format }: Figure & Pick<Course, "updates">) => (
  <Card title={title} about={about}>
    <OverUpdates
      title={`${title} over updates`}
      x={updates.map((update) => update.number)}
      lines={[{ label: title, color, values: updates.map((update) => update.metrics[metric] ?? null) }]}
      height={130}
      {...(format && { format })}
    />
  </Card>
);

interface Properties {
  title: string;
  x: readonly number[];
  lines: readonly Line[];
  between?: readonly [number, number];
  height?: number;
  format?: (value: number) => string;
}

const OverUpdates = ({ format = signed, ...chart }: Properties) => <Chart xLabel="Update" format={format} {...chart} />;

/** Small figures with the digits that say something: losses are often near 0. */
const signed = (value: number): string =>
  value !== 0 && Math.abs(value) < 0.1 ? `${Number(value.toPrecision(2))}` : number(value);
