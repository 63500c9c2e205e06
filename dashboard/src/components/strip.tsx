/** How something was divided over time: columns of shares, side by side without a gap, as one path for each kind. */

import { useState } from "preact/hooks";
import { clock, percent } from "../format";
import { Legend, type Part } from "./bar";

export interface Column {
  /** Unix time of its end, in seconds. */
  at: number;
  seconds: number;
  /** Seconds of each kind, in the order of `kinds`; what is left is empty. */
  parts: readonly number[];
}

interface Properties {
  /** What the strip shows, for screen readers. */
  title: string;
  kinds: readonly { label: string; color: string }[];
  /** What the empty part is called. */
  rest: string;
  columns: readonly Column[];
  /** Unix times in seconds of the left and the right edge. */
  range: readonly [number, number];
}

const HEIGHT = 100;

export function Strip({ title, kinds, rest, columns, range }: Properties) {
  const [at, setAt] = useState<number | null>(null);
  const [from, to] = range;
  const chosen = at === null ? columns : columns.filter((column) => column.at - column.seconds <= at && at < column.at);
  const parts = shares(chosen, kinds, rest);
  const point = (event: PointerEvent & { currentTarget: Element }) => {
    const box = event.currentTarget.getBoundingClientRect();
    setAt(from + ((event.clientX - box.left) / box.width) * (to - from));
  };
  return (
    <div class="strip">
      <svg
        viewBox={`0 0 ${to - from} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${title}: ${shares(columns, kinds, rest).map(spoken).join(", ")}`}
        onPointerMove={point}
        onPointerLeave={() => setAt(null)}
      >
        <path class="fill-idle" d={columns.map((column) => rectangle(column, 0, 1, from)).join("")} />
        {kinds.map((kind, order) => (
          <path key={kind.label} class={`fill-${kind.color}`} d={path(columns, order, from)} />
        ))}
      </svg>
      <p class="scale" aria-hidden="true">
        <span>{clock(from)}</span>
        <span>{at !== null && chosen.length > 0 ? `at ${clock(at)}` : ""}</span>
        <span>now</span>
      </p>
      <Legend parts={parts} format={percent} />
    </div>
  );
}

const spoken = (part: Part): string => `${part.label} ${percent(part.value)}`;

/** The share of each kind in the time of these columns. */
function shares(columns: readonly Column[], kinds: Properties["kinds"], rest: string): Part[] {
  const whole = columns.reduce((sum, column) => sum + column.seconds, 0) || 1;
  const parts = kinds.map((kind, order) => ({
    ...kind,
    value: columns.reduce((sum, column) => sum + (column.parts[order] ?? 0), 0) / whole,
  }));
  const used = parts.reduce((sum, part) => sum + part.value, 0);
  return [...parts, { label: rest, color: "idle", value: Math.max(0, 1 - used) }];
}

/** One rectangle for each column, on top of those of the kinds before. */
const path = (columns: readonly Column[], order: number, from: number): string =>
  columns
    .map((column) => {
      const part = column.parts[order] ?? 0;
      const below = column.parts.slice(0, order).reduce((sum, each) => sum + each, 0);
      return part > 0 ? rectangle(column, below / column.seconds, (below + part) / column.seconds, from) : "";
    })
    .join("");

/** Between two shares of the height, measured from below. */
function rectangle({ at, seconds }: Column, low: number, high: number, from: number): string {
  const [bottom, top] = [low, high].map((share) => HEIGHT * (1 - Math.min(share, 1)));
  return `M${at - seconds - from} ${bottom}h${seconds}V${top}h${-seconds}z`;
}
