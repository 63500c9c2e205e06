import { expect, test } from "vitest";
import { bytes, clock, counted, date, duration, minutes, number, percent } from "./format";

test("sizes have the largest unit that keeps them above 1", () => {
  expect([0, 1023, 1024, 538_000_000, 3 * 2 ** 30].map(bytes)).toEqual(["0 B", "1,023 B", "1 KiB", "513 MiB", "3 GiB"]);
});

test("durations have a unit that fits", () => {
  expect([0.0851, 0.5, 1.234, 60, 600].map(duration)).toEqual(["85.1 ms", "500 ms", "1.23 s", "60 s", "10 min"]);
});

test("numbers show no more digits than say something", () => {
  expect([1234.5, 56.78, 0.123, 0].map(number)).toEqual(["1,235", "56.8", "0.12", "0"]);
  expect([0, 0.012, 0.12, 1, -0.001].map(percent)).toEqual(["0 %", "1.2 %", "12 %", "100 %", "0 %"]);
});

test("times have 24 hours, also at midnight and for a browser whose language has 12", () => {
  const at = (hour: number): number => new Date(2026, 0, 31, hour, 6, 40).getTime() / 1000;
  expect([at(20), at(0)].map(clock)).toEqual(["20:06:40", "00:06:40"]);
  expect([at(20), at(0)].map(minutes)).toEqual(["20:06", "00:06"]);
  expect([at(20), at(0)].map((time) => date(time).slice(-5))).toEqual(["20:06", "00:06"]);
});

test("one is not several", () => {
  expect([0, 1, 1234].map((count) => counted(count, "request"))).toEqual(["0 requests", "1 request", "1,234 requests"]);
});
