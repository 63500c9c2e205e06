/** The part of the history that the view shows, and rates in it. */

import type { Interval } from "../../api/stats";

/** Seconds that the charts show. */
export const WINDOW_S = 300;

/** Seconds over which the rates of now are taken. */
const RECENT_S = 5;

/** Intervals touch each other, but for rounding and corrections of the clock. */
const GAP_S = 0.5;

/** Unix times of the left and the right edge of the charts. */
export function windowOf(intervals: readonly Interval[]): readonly [number, number] {
  const end = intervals.at(-1)?.at ?? Date.now() / 1000;
  return [end - WINDOW_S, end];
}

/** Tokens a second in the last seconds; 0 without an interval. */
export function rate(intervals: readonly Interval[], tokens: (interval: Interval) => number): number {
  const end = intervals.at(-1)?.at ?? 0;
  const recent = intervals.filter((interval) => interval.at > end - RECENT_S);
  const seconds = recent.reduce((sum, interval) => sum + interval.seconds, 0);
  return seconds && recent.reduce((sum, interval) => sum + tokens(interval), 0) / seconds;
}

export interface Point {
  /** Unix time in seconds. */
  at: number;
  /** null begins a time that the server has told nothing about, such as that before a restart. */
  interval: Interval | null;
}

/** The ends of the intervals, with a point without a value where there is a gap between two. */
export const points = (intervals: readonly Interval[]): Point[] =>
  intervals.flatMap((interval, order) => {
    const begin = interval.at - interval.seconds;
    const gap = begin - (intervals[order - 1]?.at ?? begin) > GAP_S;
    return [...(gap ? [{ at: begin, interval: null }] : []), { at: interval.at, interval }];
  });
