import type { TrainedAdapter, TrainingShare } from "../../api/stats";

const STATES = ["updating", "running"];

/** The adapter that learns: that of the lesson, or one that is at work, or else the one that learnt last. */
export function learner({ adapters, lesson }: TrainingShare): string | undefined {
  const rank = (each: TrainedAdapter): readonly [boolean, boolean, number] => [
    each.name === lesson?.adapter,
    STATES.includes(each.state),
    each.last_update ?? 0,
  ];
  return [...adapters].sort((one, other) => compare(rank(other), rank(one)))[0]?.name;
}

function compare(one: readonly (boolean | number)[], other: readonly (boolean | number)[]): number {
  const at = one.findIndex((value, order) => value !== other[order]);
  return at < 0 ? 0 : Number(one[at]) - Number(other[at]);
}
