/** Numbers as people read them. */

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

/** `1,234`, `56.7`, `0.12`: three digits at least, and no more after the point than say something. */
export const number = (value: number): string =>
  value.toLocaleString("en", { maximumFractionDigits: value >= 100 ? 0 : value >= 10 ? 1 : 2 });

/** Without a sign if it is written as 0. */
export const percent = (share: number): string =>
  `${(100 * share).toFixed(share > 0 && share < 0.095 ? 1 : 0).replace(/^-0$/, "0")} %`;

/** A size in binary units, as the server's flags take them. */
export function bytes(size: number): string {
  const power = Math.min(Math.max(Math.floor(Math.log2(Math.max(size, 1)) / 10), 0), SIZES.length - 1);
  return `${number(size / 1024 ** power)} ${SIZES[power]}`;
}

/** A duration with the unit that fits it: `85 ms`, `1.2 s`, `3 min`. */
export function duration(seconds: number): string {
  if (seconds < 1) {
    return `${number(1000 * seconds)} ms`;
  }
  return seconds < 120 ? `${number(seconds)} s` : `${number(Math.round(seconds / 60))} min`;
}

/** `1 request`, `1,234 requests`. */
export const counted = (value: number, what: string): string => `${number(value)} ${what}${value === 1 ? "" : "s"}`;

const DAY = { year: "numeric", month: "2-digit", day: "2-digit" } as const;
const MINUTES = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" } as const;

/** Of the day, with 24 hours wherever the browser is from. */
export const clock = (unixSeconds: number): string =>
  new Date(1000 * unixSeconds).toLocaleTimeString([], { ...MINUTES, second: "2-digit" });

/** Hours and minutes, for the axis of a chart. */
export const minutes = (unixSeconds: number): string => new Date(1000 * unixSeconds).toLocaleTimeString([], MINUTES);

export const date = (unixSeconds: number): string =>
  new Date(1000 * unixSeconds).toLocaleString([], { ...DAY, ...MINUTES });
