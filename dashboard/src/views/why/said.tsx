import type { WhySample } from "../../api/why";
import { link } from "../../router";

/** The beginning of an answer, with the way to it if it was collected. */
export const Said = ({ sample }: { sample: WhySample }) => {
  const text = sample.answer || "(empty)";
  return (
    <span class="start" title={sample.prompt}>
      {sample.readable ? (
        sample.trajectory_id ? (
          <a href={link("trajectories", sample.trajectory_id)}>{text}</a>
        ) : (
          text
        )
      ) : (
        "of another key"
      )}
    </span>
  );
};
