import { expect, test } from "vitest";
import { inSight } from "./table";

test("a table says which of its rows are seen", () => {
  expect(inSight(0, 374, 19)).toEqual({ first: 1, last: 10 });
  expect(inSight(9 * 34, 374, 19)).toEqual({ first: 10, last: 19 });
  expect(inSight(0, 374, 3)).toEqual({ first: 1, last: 3 });
});
