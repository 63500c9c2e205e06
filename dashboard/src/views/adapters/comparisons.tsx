import { useState } from "preact/hooks";
import { type AdapterVersion, type Comparison, compare, stopComparing } from "../../api/adapters";
import { may } from "../../components/action";
import { Bar } from "../../components/bar";
import { Card } from "../../components/card";
import { Confirmed } from "../../components/confirmed";
import { counted, number, percent } from "../../format";
import { VERDICTS } from "../learning/course";
import type { Overview } from "./overview";

interface Properties {
  comparisons: readonly Comparison[];
  overview: Overview;
  onDone: () => void;
}

/** Versions that compete on live requests, and what their rewards show. */
export const Comparisons = ({ comparisons, overview, onDone }: Properties) => (
  <Card title="Comparisons" about="two versions on live requests">
    {comparisons.map((comparison) => (
      <One key={comparison.lora_adapter} comparison={comparison} onDone={onDone} />
    ))}
    {comparisons.length === 0 && (
      <p class="empty">
        {!may("train")
          ? "Comparisons are shown to keys with the role train."
          : overview.trained.length === 0
            ? "Only adapters in training can be compared, because rewards decide."
            : "None since the server started. Open a version that is saved and not live, and press “Compare”."}
      </p>
    )}
  </Card>
);

function One({ comparison, onDone }: { comparison: Comparison; onDone: () => void }) {
  const { lora_adapter: adapter, live, candidate, verdict, reason, share } = comparison;
  const running = verdict === "running";
  return (
    <>
      <p>
        <b>
          {candidate} {VERDICTS[verdict]}
        </b>
        {reason && `: ${reason}`}
      </p>
      <Bar
        title={`Requests for ${adapter}`}
        parts={[
          { label: `${live}, as before`, value: 1 - share, color: "weights" },
          { label: `${candidate}, the candidate`, value: share, color: "training" },
        ]}
        format={percent}
      />
      <dl class="facts">
        <dt>{live}</dt>
        <dd>
          {counted(comparison.live_requests, "request")}, {rewards(comparison.live_mean, comparison.live_rewards)}
        </dd>
        <dt>{candidate}</dt>
        <dd>
          {counted(comparison.candidate_requests, "request")},{" "}
          {rewards(comparison.candidate_mean, comparison.candidate_rewards)}
        </dd>
        <dt>Chance of error</dt>
        <dd>
          {percent(comparison.p_better)} if called better now, {percent(comparison.p_worse)} if called worse
        </dd>
      </dl>
      {running && (
        <div class="controls">
          <Confirmed
            needs="train"
            label="End the comparison"
            title="End the comparison?"
            run={() => stopComparing(adapter).then(onDone)}
            done={`Ended without a winner; ${live} stays live.`}
          >
            It ends without a winner: {live} stays live and gets all requests again, and training continues.
          </Confirmed>
        </div>
      )}
    </>
  );
}

const rewards = (mean: number | null, count: number): string =>
  mean === null ? "no reward yet" : `mean reward ${number(mean)} of ${number(count)}`;

/** For a version that is saved and not live, of an adapter in training. */
export function StartComparison({
  version,
  overview,
  onDone,
}: Omit<Properties, "comparisons"> & { version: AdapterVersion }) {
  const [share, setShare] = useState(20);
  const { id, name, live, checkpoint } = version;
  if (live || !checkpoint || !overview.trained.includes(name)) {
    return null;
  }
  return (
    <Confirmed
      needs="train"
      label="Compare"
      title={`Compare ${id} with the live version?`}
      run={() => compare(name, checkpoint, share / 100).then(onDone)}
      done={`${id} gets ${share} % of the requests for ${name}.`}
    >
      A part of the requests for {name} gets {id}. If their rewards are better, it goes live; if they are worse, it is
      withdrawn. {name} is not trained meanwhile.
      <label class="entry">
        Share of {id}: <b>{share} %</b>
        <input
          type="range"
          min={1}
          max={50}
          value={share}
          onInput={(event) => setShare(Number(event.currentTarget.value))}
        />
      </label>
    </Confirmed>
  );
}
