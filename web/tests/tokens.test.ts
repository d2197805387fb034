import assert from "node:assert/strict";
import { test } from "node:test";
import type { Tokens } from "../src/api/types";
import { CHUNK, TokenRows, chunksOf, lastVersion, loaded, rowsOf } from "../src/tokens/layout";
import { breakLines, cells, drawn, lookRuns, tokenAt } from "../src/tokens/lines";
import { SHADE_ENDS, bytesOf, logprobsOf, shadeName, shadeOf } from "../src/tokens/logprobs";
import { RunReader } from "../src/tokens/runs";

function answer(texts: string[], changes: Partial<Tokens> = {}): Tokens {
  const n = texts.length;
  return {
    segment: 0, start: 0, total: n, prompt: 0, ids: texts.map((_, i) => i), texts,
    mask: [[1, n]], versions: [["v1", n]], logprobs: Buffer.alloc(n, 1).toString("base64"), ...changes,
  };
}

test("runs are read in any order, and nothing lies past their end", () => {
  const runs = new RunReader([["a", 2], ["b", 0], ["c", 3]]);
  assert.equal(runs.length, 5);
  assert.deepEqual([0, 1, 2, 4, 5, 1, -1].map((i) => runs.at(i)), ["a", "a", "c", "c", undefined, "a", undefined]);
});

test("a byte stands for a log-probability, and 0 for none", () => {
  const values = logprobsOf(Buffer.from([0, 1, 21, 255]).toString("base64"));
  assert.ok(Number.isNaN(values[0]));
  assert.deepEqual([...values.slice(1)].map((value) => Math.round(value * 100) / 100), [0, -1, -12.7]);
  assert.deepEqual([...bytesOf("/wA=")], [255, 0]);
  assert.equal(logprobsOf([-0.5])[0], -0.5);
});

test("every log-probability has one shade, and every shade a name", () => {
  assert.equal(shadeOf(NaN), -1);
  assert.equal(shadeOf(0), 0);
  assert.equal(shadeOf(-0.05), 1);
  assert.equal(shadeOf(-99), SHADE_ENDS.length - 1);
  assert.equal(shadeName(0), "95 % to 100 %");
  assert.match(shadeName(SHADE_ENDS.length - 1), /^less than/);
});

test("lines end at line feeds and where no token has room", () => {
  assert.deepEqual(breakLines(["ab", "cd", "e\n", "f", "ghij", "k"], 5), [0, 2, 3, 5]);
  assert.deepEqual(breakLines(["x".repeat(50), "y"], 10), [0, 1]);
  assert.deepEqual(breakLines([], 10), []);
});

test("hidden characters of a token are drawn, and its line feeds do not break the line", () => {
  assert.equal(drawn("a\n\u202e\t"), "a↵⟦U+202E⟧⇥");
  assert.ok(drawn("z".repeat(10_000)).length < 300);
  assert.equal(cells("漢字ab"), 6);
});

test("tokens with equal looks share a run, in which each is found by its character", () => {
  const texts = ["ab", "\n", "cde", "f"];
  const runs = lookRuns(0, 4, (i) => (i < 3 ? "x" : "y"));
  assert.deepEqual(runs, [{ start: 0, end: 3, look: "x" }, { start: 3, end: 4, look: "y" }]);
  assert.deepEqual([0, 1, 2, 3, 5, 9].map((offset) => tokenAt(texts, { start: 0, end: 3 }, offset)), [0, 0, 1, 2, 2, 2]);
});

test("chunks cover every token once, and prompt and response share none", () => {
  const chunks = chunksOf([{ prompt: 10, response: 2 * CHUNK + 1 }, { prompt: 0, response: 3 }]);
  assert.deepEqual(chunks.map(({ segment, start, end }) => [segment, start, end]), [
    [0, 0, 10], [0, 10, CHUNK + 10], [0, CHUNK + 10, 2 * CHUNK + 10], [0, 2 * CHUNK + 10, 2 * CHUNK + 11], [1, 0, 3],
  ]);
  assert.deepEqual(chunks.map((chunk) => chunk.border !== null), [true, true, false, false, true]);
});

test("a change of the policy version between sampled tokens has a row of its own", () => {
  const [chunk] = chunksOf([{ prompt: 0, response: 6 }]);
  assert.ok(chunk);
  const data = loaded(answer(["a", "b", "c", "d", "e", "f"], { mask: [[1, 2], [0, 1], [1, 3]], versions: [["v1", 2], ["", 1], ["v1", 1], ["v2", 2]] }));
  const rows = rowsOf(chunk, 0, data, 80, "v1");
  assert.deepEqual(rows.map((row) => (row.kind === "tokens" ? [row.start, row.end] : row.kind === "border" ? row.text : "")), [
    "response, 6 tokens", [0, 4], "Policy version v2", [4, 6],
  ]);
  assert.equal(lastVersion(data, ""), "v2");
});

test("without texts, ids are drawn and the reason is kept", () => {
  const data = loaded(answer(["x"], { texts: null, texts_reason: "no folder", ids: [42] }));
  assert.deepEqual(data.texts, ["42 "]);
  assert.equal(data.textless, "no folder");
});

test("rows find their chunk before and after it was read", () => {
  const chunks = chunksOf([{ prompt: CHUNK, response: CHUNK }]);
  const rows = new TokenRows(chunks, 16);
  const expected = rows.length;
  assert.equal(rows.at(3).kind, "awaited");
  const more = rows.put(0, [{ kind: "border", text: "x" }, { kind: "tokens", chunk: 0, start: 0, end: CHUNK }]);
  assert.equal(rows.length, expected + more);
  assert.equal(rows.chunkAt(1), 0);
  assert.equal(rows.chunkAt(2), 1);
  assert.equal(rows.rowOf(0, 17), 1);
  assert.equal(rows.find(0, CHUNK), 1);
  assert.equal(rows.find(0, 2 * CHUNK), -1);
  rows.drop(0);
  assert.equal(rows.at(1).kind, "awaited");
  assert.equal(rows.length, expected + more);
});

test("hundred thousand tokens are laid out in a moment", () => {
  const n = 100_000;
  const data = loaded(answer(Array.from({ length: n }, (_, i) => (i % 9 ? " word" : "\n"))));
  const [chunk] = chunksOf([{ prompt: 0, response: n }]);
  assert.ok(chunk);
  assert.ok(rowsOf(chunk, 0, data, 100, "").length > n / 25);
});
