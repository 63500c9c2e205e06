/** How each adapter learns: its figures over updates, its versions, and what has happened. */

import { useMemo, useState } from "preact/hooks";
import { type TrainingState, trainingReport, trainingState } from "../../api/learning";
import type { TrainingShare } from "../../api/stats";
import { Figure } from "../../components/figure";
import { Tabs } from "../../components/tabs";
import { WithTraining } from "../../components/with-training";
import { counted, number } from "../../format";
import { usePolled } from "../../live/polled";
import { link } from "../../router";
import { Charts } from "./charts";
import { Controls } from "./controls";
import { courseOf } from "./course";
import { learner } from "./learner";
import { Lineage } from "./lineage";
import { Moments } from "./moments";
import { Sources } from "./sources";
import { Waiting } from "./waiting";
import { useEvents } from "./watch";
import "../../style/learning.css";

const EVERY_MS = 2000;

export const LearningView = ({ rest }: { rest: readonly string[] }) => (
  <WithTraining subject="How adapters learn is">
    {(_, training) => <Adapters training={training} wanted={rest[0]} />}
  </WithTraining>
);

function Adapters({ training, wanted }: { training: TrainingShare; wanted: string | undefined }) {
  const [first] = useState(() => learner(training)); // it stays while somebody looks
  const names = training.adapters.map((adapter) => adapter.name);
  const selected = names.find((name) => name === wanted) ?? names.find((name) => name === first) ?? names[0];
  if (selected === undefined) {
    return <p class="empty">No adapter is in training. The view Adapters starts one.</p>;
  }
  if (names.length === 1) {
    return <OneAdapter adapter={selected} />;
  }
  return (
    <Tabs
      label="Adapters in training"
      names={names}
      selected={selected}
      onSelect={(name) => {
        location.hash = link("learning", name);
      }}
    >
      <OneAdapter key={selected} adapter={selected} />
    </Tabs>
  );
}

function OneAdapter({ adapter }: { adapter: string }) {
  const { value: state, refused: stateRefused } = usePolled(adapter, () => trainingState(adapter), EVERY_MS);
  const { value: report } = usePolled(adapter, () => trainingReport(adapter), EVERY_MS);
  const { events, truncated, refused } = useEvents(adapter);
  const course = useMemo(() => courseOf(events ?? []), [events]);
  const why = refused ?? stateRefused;
  if (why) {
    return <p class="empty">{why.message}</p>;
  }
  if (state === null || events === null) {
    return <p class="empty">Asking the server…</p>;
  }
  const paused = course.paused || state.state === "paused";
  return (
    <>
      <Headline
        state={state}
        paused={paused}
        rewards={course.updates.flatMap((update) => update.metrics.reward_mean ?? [])}
      />
      {state.advice && (
        <p class="advice" role="status">
          {state.advice}
        </p>
      )}
      <Controls adapter={adapter} state={state} paused={paused} />
      {course.updates.length === 0 ? <Waiting state={state} /> : <Charts {...course} />}
      <div class="cards one">
        {course.versions.length > 0 && <Lineage adapter={adapter} versions={course.versions} best={state.best_lora} />}
        {report && <Sources report={report} />}
        <Moments moments={course.moments} truncated={truncated} />
      </div>
    </>
  );
}

const STATES: Readonly<Record<string, string>> = {
  disabled: "Off",
  idle: "Waiting",
  running: "Learning",
  updating: "Updating",
  paused: "Paused",
  stopped: "Stopped",
};

interface HeadlineProperties {
  state: TrainingState;
  paused: boolean;
  /** Of the updates that learnt from rewards. */
  rewards: readonly number[];
}

function Headline({ state, paused, rewards }: HeadlineProperties) {
  const { evaluation } = state;
  return (
    <dl class="figures">
      <Figure
        label={state.lora_adapter ?? ""}
        value={paused && state.state === "updating" ? "Pausing" : (STATES[state.state] ?? state.state)}
      >
        {number(state.trajectories_collected)} answers collected
      </Figure>
      <Figure label="Updates" value={number(state.step)}>
        for the next one: {counted(state.groups_ready, "group")} of answers
      </Figure>
      <Reward rewards={rewards} updates={state.step} />
      <Figure label="Evaluation" value={evaluation ? number(evaluation.mean) : "–"}>
        {evaluation ? `of ${evaluation.lora_adapter}, ${number(evaluation.answers)} answers` : "none yet"}
      </Figure>
      <Figure label="Live version" value={state.live_lora ?? "none yet"}>
        {state.best_lora ? `best: ${state.best_lora}` : "no best one yet"}
      </Figure>
    </dl>
  );
}

/** An update of examples or edits has no rewards. */
const Reward = ({ rewards, updates }: { rewards: readonly number[]; updates: number }) => {
  const [first] = rewards;
  const last = rewards.at(-1);
  return first === undefined || last === undefined ? (
    <Figure label="Reward" value="–">
      {updates > 0 ? "no update of rewards yet" : "no update yet"}
    </Figure>
  ) : (
    <Figure label="Reward" value={number(last)}>
      {number(first)} at the first update of rewards
    </Figure>
  );
};
