import { useState } from "preact/hooks";
import { correct, type Rated, rate } from "../../api/people";
import type { Sample, Turn } from "../../api/trajectories";
import { Action } from "../../components/action";
import { Confirmed } from "../../components/confirmed";
import { toast } from "../../components/toast";
import { number } from "../../format";
import { person } from "../../live/stats";
import { because } from "./reasons";

interface Properties {
  turn: Turn;
  sample: Sample;
  isEdit: boolean;
  /** Which answer it is. */
  name: string;
  onDone: () => void;
}

/** What a person can say about an answer: that it is good or bad, and what it should have been. */
export function Thumbs({ turn, sample, isEdit, name, onDone }: Properties) {
  if (isEdit) {
    return null;
  }
  const { thumbs_up: up, thumbs_down: down, trajectory_id: id } = turn;
  const vote = (score: 0 | 1) => () => rate(id, score, person()).then(told).then(onDone);
  return (
    <div class="thumbs">
      {sample.thumbs === "nothing" ? (
        up + down > 0 && (
          <p class="about">
            {up} for it, {down} against it
          </p>
        )
      ) : (
        <>
          <Action needs="train" run={vote(1)}>
            <span class="hidden">{name}: </span>Good <b>{up}</b>
          </Action>
          <Action needs="train" run={vote(0)}>
            <span class="hidden">{name}: </span>Bad <b>{down}</b>
          </Action>
        </>
      )}
      <Correct turn={turn} name={name} onDone={onDone} />
    </div>
  );
}

const told = ({ score, reward, people, late }: Rated): void =>
  toast(
    late
      ? "Counted, as late feedback on an answer that had been dropped."
      : `Counted: its reward is ${number(reward ?? score)}${people && people > 1 ? `, the mean of ${people} people` : ""}.`,
  );

/** What thumbs on an answer do, where that is not plain. */
export function standing({ thumbs, fate, reason }: Sample): string {
  if (thumbs === "count") {
    return "";
  }
  if (thumbs === "count_late") {
    return "Dropped; a thumb counts all the same, as late feedback.";
  }
  if (fate === "training") {
    return "An update learns from it now, so thumbs count no longer.";
  }
  return fate === "trained"
    ? "Trained on, so thumbs count no longer; a correction does."
    : `Thumbs do not count: ${because(reason)}.`;
}

/** Writes what the answer should have been. */
function Correct({ turn, name, onDone }: Pick<Properties, "turn" | "name" | "onDone">) {
  const [text, setText] = useState(turn.text);
  return (
    <Confirmed
      needs="train"
      label={`Correct ${name.toLowerCase()}`}
      title={`Correct ${name.toLowerCase()}`}
      run={() => correct(turn.trajectory_id, text, person()).then(onDone)}
      done="The correction waits for an update, which will imitate it."
    >
      Write the whole answer as it should have been. The adapter learns to say that. Your last correction of an answer
      counts.
      <label class="entry">
        The right answer
        <textarea rows={5} value={text} required onInput={(event) => setText(event.currentTarget.value)} />
      </label>
    </Confirmed>
  );
}
