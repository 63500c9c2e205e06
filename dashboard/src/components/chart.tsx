/** A chart of several lines over time or over steps, drawn by uPlot. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { clock, minutes } from "../format";
import { color, scheme } from "./theme";

export interface Line {
  label: string;
  /** The name of a colour in base.css, such as `decode`. */
  color: string;
  /** One value for each x; null leaves a gap. */
  values: readonly (number | null)[];
  /** Fills the space below the line. */
  filled?: boolean;
  /** Draws the line with dashes. */
  dashed?: boolean;
  /** Draws a thin line, such as that of a bound. */
  faint?: boolean;
}

interface Properties {
  /** What the chart shows, for screen readers. */
  title: string;
  /** Unix times in seconds if `overTime`, else any growing numbers, such as steps. */
  x: readonly number[];
  lines: readonly Line[];
  /** How values are written, with their unit. */
  format: (value: number) => string;
  overTime?: boolean;
  /** What x is, if it is not time. */
  xLabel?: string;
  /** The part of x that is shown; by default all of it. */
  range?: readonly [number, number];
  /** The places of two lines, counted from 0, that the space between is filled of. */
  between?: readonly [number, number];
  /** Pixels. */
  height?: number;
  /** The distances that marks on the left may have; by default any. */
  marks?: readonly number[];
}

/** Distances between the marks of whole numbers, such as steps, and of shares that are written in percent. */
export const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000];
export const SHARES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5];

/** With fewer values than this, each has a point, so that the first one can be seen. */
const FEW = 30;

export function Chart(properties: Properties) {
  const { title, lines, format, height = 180 } = properties;
  const place = useRef<HTMLDivElement>(null);
  const drawn = useRef<uPlot | null>(null);
  const data = dataOf(properties);
  const shape = JSON.stringify([scheme.value, height, lines.map(({ values, ...look }) => look)]);
  const range = useRef(properties.range);
  range.current = properties.range;

  useEffect(() => {
    const element = place.current as HTMLDivElement;
    const chart = new uPlot(
      options(properties, element.clientWidth, () => range.current),
      data,
      element,
    );
    drawn.current = chart;
    const sizes = new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height }));
    sizes.observe(element);
    return () => {
      sizes.disconnect();
      chart.destroy();
    };
  }, [shape]); // `shape` stands for all that the chart is made of
  useEffect(() => {
    drawn.current?.setData(data);
    queueMicrotask(() => showLast(drawn.current)); // after uPlot has drawn, which empties the legend
  });

  return (
    <figure class="chart">
      <div ref={place} aria-hidden="true" />
      <figcaption class="hidden">
        {title}. {lines.map((line) => summary(line, format)).join(" ")}
      </figcaption>
    </figure>
  );
}

/** The legend has the last values, unless there are none or the pointer is on the chart. */
function showLast(chart: uPlot | null): void {
  const values = chart?.data[0].length ?? 0;
  if (chart && values > 0 && (chart.cursor.left ?? -1) < 0) {
    chart.setLegend({ idx: values - 1 });
  }
}

const dataOf = ({ x, lines }: Properties): uPlot.AlignedData =>
  [x, ...lines.map((line) => line.values)] as unknown as uPlot.AlignedData;

/** The line in words, in place of a picture: `Generated: now 12, from 0 to 30.` */
function summary({ label, values }: Line, format: (value: number) => string): string {
  const known = values.filter((value) => value !== null);
  const last = known.at(-1);
  if (last === undefined) {
    return `${label}: no values yet.`;
  }
  return `${label}: now ${format(last)}, from ${format(Math.min(...known))} to ${format(Math.max(...known))}.`;
}

function options(shown: Properties, width: number, range: () => Properties["range"]): uPlot.Options {
  const { overTime = false, format, height = 180, between, marks } = shown;
  const axis = { stroke: color("quiet"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
  return {
    width,
    height,
    padding: [8, 12, 0, 0],
    legend: { live: true },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: {
      x: { time: overTime, range: (chart) => [...(range() ?? spread(chart.data[0]))] as [number, number] },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high ?? 0) > 0 ? 1.1 * (high ?? 0) : 1] },
    },
    axes: [
      {
        ...axis,
        grid: { show: false },
        size: 28,
        space: 60,
        ...(overTime ? { values: (_, ticks) => ticks.map(minutes) } : { incrs: WHOLE }),
      },
      {
        ...axis,
        size: 52,
        ...(marks && { incrs: [...marks] }),
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))),
      },
    ],
    ...(between && {
      bands: [{ series: [between[1] + 1, between[0] + 1], fill: `${color(shown.lines[0]?.color ?? "quiet")}22` }],
    }),
    series: [
      {
        label: overTime ? "Time" : (shown.xLabel ?? ""),
        value: (_, x) => (x === null ? "–" : overTime ? clock(x) : `${x}`),
      },
      ...shown.lines.map((line) => ({
        label: line.label,
        stroke: color(line.color),
        width: line.faint ? 0.5 : 1.5,
        points: { show: (chart: uPlot) => !overTime && !line.faint && chart.data[0].length < FEW, size: 5 },
        value: (_: uPlot, value: number | null) => (value === null ? "–" : format(value)),
        ...(line.filled && { fill: `${color(line.color)}22` }),
        ...(line.dashed && { dash: [6, 4] }),
      })),
    ],
  };
}

/** From the first x to the last one. An empty range cannot be drawn: one point is in the middle. */
export function spread(x: ArrayLike<number>): readonly [number, number] {
  const [low, high] = [x[0] ?? 0, x[x.length - 1] ?? 0];
  return low < high ? [low, high] : [low - 0.5, low + 0.5];
}
