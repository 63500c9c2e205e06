/** Why answers were dropped, or an update was not made, for the commonest reasons; docs/operating.md has them all. */
const REASONS: Readonly<Record<string, string>> = {
  zero_variance: "all rewards are equal",
  single: "nothing to compare it with",
  stale: "drawn by a version that is too old",
  unknown_version: "drawn by a version that training does not continue from",
  buffer_full: "no room",
  low_reward: "its reward is too low to imitate",
  scoring_failed: "scoring failed",
  timeout: "no reward in time",
  held: "its update was refused",
  skipped: "its update was skipped",
  replaced: "sent again",
  unrewarded: "closed without a reward",
  closed: "came after its group was closed",
  stopped: "its lesson has ended",
  no_signal: "all rewards were equal",
  no_trajectories: "no answers",
};

export const because = (reason: string): string => REASONS[reason] ?? reason.replaceAll("_", " ");
