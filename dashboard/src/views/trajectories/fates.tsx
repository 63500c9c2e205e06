import type { Fate } from "../../api/trajectories";
import { because } from "./reasons";

/** What became of a group or a sample, as people say it. */
export const FATE_WORDS: Readonly<Record<Fate, string>> = {
  waiting: "waits for a reward",
  scored: "waits for an update",
  training: "in an update now",
  trained: "trained on",
  dropped: "dropped",
};

export const FateTag = ({ fate, reason }: { fate: Fate; reason: string }) => (
  <>
    <span class={`tag fate-${fate}`}>{FATE_WORDS[fate]}</span>
    {reason && because(reason)}
  </>
);
