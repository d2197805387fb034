import assert from "node:assert/strict";
import { test } from "node:test";
import { argumentsText } from "../src/text/arguments";

test("arguments have a line each, and programs their line feeds", () => {
  assert.equal(argumentsText('{"path": "a.py", "lines": [1, 2], "text": "x = 1\\ny = 2"}'), "path: a.py\nlines: [1,2]\ntext: \n  x = 1\n  y = 2");
});

test("what is no object is shown as it was sent", () => {
  for (const sent of ["", "{", '"text"', "[1]", "{}", "null", '{"a": "cut off']) assert.equal(argumentsText(sent), sent);
});

test("names of a hostile model are shown, and change nothing", () => {
  assert.equal(argumentsText('{"__proto__": "x", "a\\nb": 1}'), "__proto__: x\na\\nb: 1");
});
