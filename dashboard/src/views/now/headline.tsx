import type { Interval, Percentiles, Stats } from "../../api/stats";
import { Figure } from "../../components/figure";
import { duration, number } from "../../format";
import { rate } from "./window";

/** The figures that people look for first. */
export function Headline({ stats, intervals }: { stats: Stats; intervals: readonly Interval[] }) {
  const { queue, latency } = stats;
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
      <Figure label="Rows" value={number(queue.running)}>
        of {number(queue.rows)} in the batch
      </Figure>
      <Figure label="Waiting" value={number(queue.waiting)}>
        {number(queue.held)} of {number(queue.limit)} places held
      </Figure>
    </dl>
  );
}

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
