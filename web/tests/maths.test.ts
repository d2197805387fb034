import assert from "node:assert/strict";
import { test } from "node:test";
import { MOST_PIXELS, scrollFor, windowOf } from "../src/window/maths";

test("a window has the rows that can be seen and the spare ones", () => {
  assert.deepEqual(windowOf(1000, 20, 400, 100, 5), { first: 15, end: 30, above: 300, height: 20_000 });
  assert.deepEqual(windowOf(3, 20, 0, 500, 5), { first: 0, end: 3, above: 0, height: 60 });
  assert.deepEqual(windowOf(0, 20, 50, 500, 5), { first: 0, end: 0, above: 0, height: 0 });
});

test("a list that became shorter than its scroll position shows its end", () => {
  const shown = windowOf(10, 20, 9_999, 100, 2);
  assert.equal(shown.end, 10);
  assert.ok(shown.first <= 5);
});

test("a list higher than browsers can draw reaches its last row", () => {
  const rows = 2_000_000;
  const shown = windowOf(rows, 26, MOST_PIXELS - 600, 600, 4);
  assert.equal(shown.height, MOST_PIXELS);
  assert.equal(shown.end, rows);
  for (let scrolled = 0; scrolled < MOST_PIXELS; scrolled += 999_983) {
    const { first, end, above } = windowOf(rows, 26, scrolled, 600, 4);
    assert.ok(first < end && end <= rows);
    assert.ok(above <= scrolled && above + (end - first) * 26 >= Math.min(scrolled + 600, MOST_PIXELS) - 1);
  }
});

test("a row is brought into view by the least scrolling", () => {
  assert.equal(scrollFor(5, 100, 20, 0, 200), 0);
  assert.equal(scrollFor(10, 100, 20, 0, 200), 20);
  assert.equal(scrollFor(2, 100, 20, 100, 200), 40);
});
