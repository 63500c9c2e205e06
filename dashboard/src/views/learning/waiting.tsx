import type { TrainingState } from "../../api/learning";
import { Card } from "../../components/card";
import { Command } from "../../components/command";
import { counted, number } from "../../format";
import { now } from "../../live/stats";
import { because } from "../trajectories/reasons";

/** What the first update waits for. */
export const Waiting = ({ state }: { state: TrainingState }) => (
  <Card title="No update yet">
    <p>
      {state.state === "updating"
        ? "The first update is being made."
        : "An update is made when enough groups of answers have rewards that differ."}{" "}
      Until now: {counted(state.trajectories_collected, "answer")} collected, {number(state.trajectories_waiting)}{" "}
      without a reward yet; {counted(state.groups_ready, "group")} ready for the update.
      {Object.values(state.drops).some(Boolean) && ` Dropped: ${reasons(state.drops)}.`}
    </p>
    {state.pause_reason && (
      <p>
        Updates are paused
        {state.pause_reason === "asked" ? ". Press “Resume updates” above." : `: ${state.pause_reason}.`}
      </p>
    )}
    {state.rollouts ? <Rollouts rollouts={state.rollouts} /> : <Collect adapter={state.lora_adapter} />}
  </Card>
);

const reasons = (counts: Record<string, number>): string =>
  Object.entries(counts)
    .map(([reason, count]) => `${number(count)} (${because(reason)})`)
    .join(", ");

const Rollouts = ({ rollouts }: { rollouts: NonNullable<TrainingState["rollouts"]> }) => (
  <p>
    The server draws answers to tasks of {rollouts.environment} by itself: {rollouts.state}.
    {rollouts.last_failure && ` The last failure: ${rollouts.last_failure}`}
  </p>
);

const Collect = ({ adapter }: { adapter: string | null }) => (
  <>
    <p>Mark requests with collect_trajectory, and give them a rule for the reward, such as a pattern:</p>
    <Command text={curl(adapter)} />
  </>
);

const BODY = {
  prompt: "The film was dull. Positive or negative?",
  n: 8,
  max_tokens: 12,
  collect_trajectory: true,
  scoring_function: "regex",
  metadata: { pattern: "(?i)negative" },
};

const curl = (adapter: string | null): string =>
  [
    `curl ${location.origin}/v1/completions`,
    ...(now.value?.caller.required ? ['-H "Authorization: Bearer $MLX_PARALLM_API_KEY"'] : []),
    "-H 'Content-Type: application/json'",
    `-d '${JSON.stringify({ lora_adapter: adapter, ...BODY })}'`,
  ].join(" \\\n  ");
