import type { Interval, Percentiles, Stats } from "../../api/stats";
import { Figure } from "../../components/figure";
import { duration, number } from "../../format";
import { rate } from "./window";

/** The figures that people look for first. */
export function Headline({ stats, intervals }: { stats: Stats; intervals: readonly Interval[] }) {
  const { queue, latency, load } = stats;
  return (
    <dl class="figures">
      <Figure label="Generated" value={number(rate(intervals, (interval) => interval.generated_tokens))}>
        tokens a second
      </Figure>
      <Figure label="Prompts" value={number(rate(intervals, (interval) => interval.prompt_tokens))}>
        tokens a second
      </Figure>
      <Latency label="First token" values={latency.first_token} />
      <Latency label="Between tokens" values={latency.between_tokens} />
      <Figure label="Answering" value={number(queue.running)}>
        of {number(queue.rows)} at once
      </Figure>
      <Figure label="Waiting" value={number(queue.waiting)}>
        room for {number(Math.max(0, queue.limit - queue.held))} more
      </Figure>
      <Figure label="Errors" value={number(total(load.errors))}>
        {byStatus(load.errors)}
      </Figure>
    </dl>
  );
}

const total = (errors: Stats["load"]["errors"]): number => Object.values(errors).reduce((sum, count) => sum + count, 0);

/** `2 of 429, 1 of 500 in the last minute`. */
export const byStatus = (errors: Stats["load"]["errors"]): string => {
  const each = Object.entries(errors).map(([status, count]) => `${number(count)} of ${status}`);
  return `${each.join(", ")} in the last minute`.trim();
};

/** The median of the last minute, and its slow end. */
const Latency = ({ label, values }: { label: string; values: Percentiles | null }) =>
  values ? (
    <Figure label={label} value={duration(values.p50)}>
      <span class="whole">p95 {duration(values.p95)}</span> <span class="whole">p99 {duration(values.p99)}</span>
    </Figure>
  ) : (
    <Figure label={label} value="–">
      none in the last minute
    </Figure>
  );
