import { useState } from "preact/hooks";
import { correct, type Rated, rate } from "../../api/people";
import type { Sample, Turn } from "../../api/trajectories";
import { Action } from "../../components/action";
import { Confirmed } from "../../components/confirmed";
import { toast } from "../../components/toast";
import { number } from "../../format";
import { person } from "../../live/stats";
import { because } from "./fates";

interface Properties {
  turn: Turn;
  sample: Sample;
  isEdit: boolean;
  /** Which answer it is. */
  name: string;
  onDone: () => void;
}

/** What a person can say about an answer, or why nothing more can be said. */
export function Thumbs({ turn, sample, isEdit, name, onDone }: Properties) {
  if (isEdit) {
    return null;
  }
  const { thumbs_up: up, thumbs_down: down, trajectory_id: id } = turn;
  const vote = (score: 0 | 1) => () => rate(id, score, person()).then(told).then(onDone);
  return (
    <div class="thumbs">
      {sample.thumbs === "nothing" ? (
        <p class="about">
          {up + down > 0 && `${up} for it, ${down} against it. `}
          {whyNot(sample)}
        </p>
      ) : (
        <>
          <Action needs="train" run={vote(1)}>
            <span aria-hidden="true">👍</span> <span class="hidden">{name} is good: </span>
            {up}
          </Action>
          <Action needs="train" run={vote(0)}>
            <span aria-hidden="true">👎</span> <span class="hidden">{name} is bad: </span>
            {down}
          </Action>
        </>
      )}
      <Correct turn={turn} name={name} onDone={onDone} />
      {sample.thumbs === "count_late" && <p class="about">It was dropped; a thumb counts all the same, as late.</p>}
    </div>
  );
}

const told = ({ reward, people, late }: Rated): void =>
  toast(
    late
      ? "Counted, as late feedback on an answer that had been dropped."
      : `Counted: its reward is ${number(reward)}${people > 1 ? `, the mean of ${people} people` : ""}.`,
  );

function whyNot({ fate, reason }: Sample): string {
  if (fate === "training") {
    return "An update learns from it now, so thumbs count no longer.";
  }
  return fate === "trained"
    ? "It was trained on, so thumbs count no longer; a correction does."
    : `Thumbs do not count: ${because(reason) || "it has ended"}.`;
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
