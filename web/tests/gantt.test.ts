import assert from "node:assert/strict";
import { test } from "node:test";
import type { GanttRow, Span } from "../src/api/types";
import { tinyReward, duration, ago } from "../src/text/format";
import { aligned, median, rangeOf, stragglers, tickStep, workOf } from "../src/views/job/ganttRows";

function row(id: string, ...spans: Span[]): GanttRow {
  return { id, task_id: "t", sample: 0, status: "succeeded", reward: 1, spans };
}

test("waits do not make a straggler, work does", () => {
  const rows = [row("a", ["run-queue", 0, 100], ["run", 100, 104]), row("b", ["run", 0, 5]), row("c", ["run", 0, 6]), row("d", ["run", 2, 22])];
  const usual = median(rows.map(workOf));
  assert.equal(usual, 5.5);
  assert.deepEqual(stragglers(rows, usual).map((item) => item.id), ["d"]);
});

test("a range has a length, also of nothing", () => {
  assert.deepEqual(rangeOf([]), { start: 0, end: 1 });
  assert.deepEqual(rangeOf([row("a", ["run", 3, 3])]), { start: 3, end: 4 });
  assert.deepEqual(rangeOf([row("a", ["init", 3, 5], ["run", 5, 9])]), { start: 3, end: 9 });
});

test("a range begins with the earliest row and ends with the latest, wherever they stand", () => {
  const rows = [row("a", ["init", 5, 9]), row("b", ["init-queue", 3, 4], ["init", 4, 6]), row("c", ["init", 7, 12]), row("d", ["init", 6, 8])];
  assert.deepEqual(rangeOf(rows), { start: 3, end: 12 });
  assert.deepEqual(rangeOf([row("empty"), ...rows]), { start: 3, end: 12 });
});

test("stragglers come with the longest first, and a median of an odd number is its middle", () => {
  const rows = [row("a", ["run", 0, 4]), row("b", ["run", 0, 9]), row("c", ["run", 0, 4]), row("d", ["init", 0, 5], ["run", 5, 25]), row("e", ["run", 0, 8])];
  const usual = median([4, 9, 4]);
  assert.equal(usual, 4);
  assert.deepEqual(stragglers(rows, usual).map((item) => item.id), ["d", "b"]);
  assert.deepEqual(stragglers(rows, 0), []);
});

test("aligned rows start at zero", () => {
  assert.deepEqual(aligned([row("a", ["init", 3, 5])])[0]?.spans, [["init", 0, 2]]);
  const [first, second] = aligned([row("a", ["init", 3, 5], ["run", 5, 9]), row("b", ["init", 7, 8])]);
  assert.deepEqual([first?.spans, second?.spans], [[["init", 0, 2], ["run", 2, 6]], [["init", 0, 1]]]);
});

test("marks of the axis are few", () => {
  for (const seconds of [0.01, 1, 59, 3_600, 1e6, 1e9]) assert.ok(seconds / tickStep(seconds, 8) <= 8);
});

test("durations have at most two units", () => {
  assert.equal(duration(0.84), "840 ms");
  assert.equal(duration(59.6), "60 s");
  assert.equal(duration(250), "4 min 10 s");
  assert.equal(duration(7_500), "2 h 5 min");
  assert.equal(duration(null), "–");
  assert.equal(ago(100, 99), "now");
});

test("rewards fit a cell", () => {
  assert.deepEqual([0, 1, 0.5, 0.123, -0.25, 12].map(tinyReward), ["0", "1", ".5", ".12", "-.25", "12"]);
});
