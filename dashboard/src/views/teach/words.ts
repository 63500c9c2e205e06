/** What a lesson does, or how it has ended, in words. */

import type { Lesson } from "../../api/lessons";
import { number } from "../../format";

const ENDS: Record<NonNullable<Lesson["outcome"]>, string> = {
  learnt: "Learnt: nearly all answers earn the reward now.",
  finished: "Finished: all its updates are made.",
  stopped: "Stopped. What it has taught stays.",
  no_signal: "Ended: there was nothing to learn from.",
  failed: "Failed.",
  interrupted: "Interrupted: the server was ended. What it has taught is kept.",
};

export function sentence({ state, outcome, reason, updates, showing }: Lesson): string {
  if (outcome) {
    return outcome === "failed" ? `${ENDS.failed} ${reason}` : ENDS[outcome];
  }
  if (state === "paused") {
    return `Paused${reason && reason !== "asked" ? `: ${reason}` : ". Resume training to go on"}.`;
  }
  if (showing) {
    return `Few answers have the word, so the model first imitates some of its own that do. ${imitating(showing)}`;
  }
  return updates === 0 ? "Drawing the first answers…" : "Learning: each update is live at once.";
}

const imitating = ({ examples, number: place, time, times, loss }: NonNullable<Lesson["showing"]>): string =>
  examples === 0
    ? "Drawing them…"
    : `Imitating example ${place} of ${examples}, round ${time} of ${times}${loss === null ? "" : `; loss ${number(loss)}`}.`;
