import { expect, test } from "vitest";
import { bytes, duration, number, percent } from "./format";

test("sizes have the largest unit that keeps them above 1", () => {
  expect([0, 1023, 1024, 538_000_000, 3 * 2 ** 30].map(bytes)).toEqual(["0 B", "1,023 B", "1 KiB", "513 MiB", "3 GiB"]);
});

test("durations have a unit that fits", () => {
  expect([0.0851, 0.5, 1.234, 60, 600].map(duration)).toEqual(["85.1 ms", "500 ms", "1.23 s", "60 s", "10 min"]);
});

test("numbers show no more digits than say something", () => {
  expect([1234.5, 56.78, 0.123, 0].map(number)).toEqual(["1,235", "56.8", "0.12", "0"]);
  expect([0, 0.012, 0.12, 1].map(percent)).toEqual(["0 %", "1.2 %", "12 %", "100 %"]);
});
