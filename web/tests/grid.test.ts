import assert from "node:assert/strict";
import { test } from "node:test";
import type { GridRow } from "../src/api/types";
import { withEnded } from "../src/views/job/gridRows";

const row = (no: number, samples: GridRow["samples"]): GridRow => ({
  no, task_id: `t${no}`, state: "active", informative: false, delivered: false, reason: "", mean: null, samples,
});

test("an end fills its cell, and the last one ends its group", () => {
  const rows = [row(0, [["a", "l", null], ["b", "s", 1]]), row(1, [["c", "q", null]])];
  const [first, second] = withEnded(rows, [{ id: "a", task_id: "t0", status: "succeeded", reward: 0 }]);
  assert.deepEqual(first?.samples, [["a", "s", 0], ["b", "s", 1]]);
  assert.deepEqual([first?.mean, first?.state, first?.informative], [0.5, "ended", false]);
  assert.equal(second, rows[1]);
});

test("a failure has no reward, and an ended group keeps the signal that the control plane says", () => {
  const known = { ...row(0, [["a", "l", null], ["b", "s", 1], ["c", "l", null]]), informative: true };
  const [only] = withEnded([known], [
    { id: "a", task_id: "t0", status: "failed", reward: null },
    { id: "c", task_id: "t0", status: "succeeded", reward: 1 },
  ]);
  assert.deepEqual([only?.samples[0], only?.mean, only?.informative], [["a", "f", null], 1, true]);
});

test("a group with a sample under way stays active and says nothing of its signal", () => {
  const rows = [row(0, [["a", "l", null], ["b", "q", null]]), row(1, [["c", "l", null], ["d", "l", null]])];
  const [first, second] = withEnded(rows, [
    { id: "a", task_id: "t0", status: "succeeded", reward: 1 },
    { id: "c", task_id: "t1", status: "cancelled", reward: null },
    { id: "d", task_id: "t1", status: "succeeded", reward: 0 },
  ]);
  assert.deepEqual([first?.samples, first?.mean, first?.state], [[["a", "s", 1], ["b", "q", null]], 1, "active"]);
  assert.equal(first?.informative, false);
  assert.deepEqual([second?.samples, second?.mean, second?.state], [[["c", "c", null], ["d", "s", 0]], 0, "ended"]);
  const [leased] = withEnded([row(0, [["a", "l", null], ["b", "l", null]])], [{ id: "a", task_id: "t0", status: "failed", reward: null }]);
  assert.deepEqual([leased?.state, leased?.mean], ["active", null]);
});
