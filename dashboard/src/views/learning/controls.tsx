import { pauseTraining, resumeTraining, rollBackTraining, type TrainingState } from "../../api/learning";
import { Action } from "../../components/action";
import { Confirmed } from "../../components/confirmed";
import { toast } from "../../components/toast";
import { Share } from "./share";

/** Pauses and resumes the updates of an adapter, goes back to its best version, and shares the device. */
export function Controls({ adapter, state, paused }: { adapter: string; state: TrainingState; paused: boolean }) {
  const { best_lora: best, live_lora: live } = state;
  return (
    <div class="controls">
      {paused ? (
        <Action needs="train" run={() => resumeTraining(adapter).then(() => toast("Updates go on."))}>
          Resume updates
        </Action>
      ) : (
        <Confirmed
          needs="train"
          label="Pause updates"
          title={`Pause the updates of ${adapter}?`}
          run={() => pauseTraining(adapter)}
          done="Paused. An update that is being made ends first."
        >
          No more updates are made until somebody resumes them. Requests are served as before, and answers are still
          collected.
        </Confirmed>
      )}
      {best !== null && best !== live && (
        <Confirmed
          needs="train"
          label={`Roll back to the best, ${best}`}
          title={`Roll back to ${best}?`}
          run={() => rollBackTraining(adapter)}
          done={`${best} is live again.`}
        >
          It has the best evaluation or, without evaluations, the best mean reward. Requests for {adapter} get it from
          now on, and training continues from it.
        </Confirmed>
      )}
      <Share />
    </div>
  );
}
