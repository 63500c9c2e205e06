import { expect, test } from "vitest";
import { EventParser } from "./parser";

const TEXT = 'id: 7\nevent: update\ndata: {"step":1}\n\n: ping\n\ndata: a\ndata: b\n\n';
const MESSAGES = [
  { id: "7", kind: "update", data: '{"step":1}' },
  { id: "7", kind: "message", data: "a\nb" },
];

test("events are the same however the text is cut, and whatever ends its lines", () => {
  for (const text of [TEXT, TEXT.replaceAll("\n", "\r\n")]) {
    for (let size = 1; size <= text.length; size += 1) {
      const parser = new EventParser();
      const pieces = text.match(new RegExp(`[^]{1,${size}}`, "g")) ?? [];
      expect(pieces.flatMap((piece) => parser.push(piece))).toEqual(MESSAGES);
    }
  }
});

test("an event that is not ended is not given", () => {
  expect(new EventParser().push("data: half")).toEqual([]);
});

test("comments and unknown fields are skipped", () => {
  expect(new EventParser().push(": ping\nretry: 10\nunknown\ndata:x\n\n")).toEqual([
    { id: "", kind: "message", data: "x" },
  ]);
});
