import assert from "node:assert/strict";
import { test } from "node:test";
import { folded, shortened, visible, visibleLine } from "../src/text/visible";

test("controls, escapes of terminals and DEL have names", () => {
  assert.equal(visible("\u001b[31mred\u0000\u007f"), "⟦ESC⟧[31mred⟦NUL⟧⟦DEL⟧");
  assert.equal(visible("a\tb\nc\r\n"), "a\tb\nc⟦CR⟧\n");
});

test("marks of direction, zero width and tags have code points", () => {
  assert.equal(visible("x\u202Ey\u2066z\u200b\ufeff\u00ad\u0085"), "x⟦U+202E⟧y⟦U+2066⟧z⟦U+200B⟧⟦U+FEFF⟧⟦U+00AD⟧⟦U+0085⟧");
  assert.equal(visible("\u{e0041}\u2028\u061c\u3164"), "⟦U+E0041⟧⟦U+2028⟧⟦U+061C⟧⟦U+3164⟧");
});

test("the first and the last character of each hidden range has its code point", () => {
  const ranges = [
    [0x7f, 0x9f], [0xad, 0xad], [0x34f, 0x34f], [0x61c, 0x61c], [0x115f, 0x1160], [0x17b4, 0x17b5], [0x180b, 0x180f], [0x200b, 0x200f],
    [0x2028, 0x202e], [0x2060, 0x206f], [0x3164, 0x3164], [0xfe00, 0xfe0e], [0xfeff, 0xfeff], [0xffa0, 0xffa0], [0xfff0, 0xfffb],
    [0x1bca0, 0x1bca3], [0x1d173, 0x1d17a], [0xe0000, 0xe0fff], [0xd800, 0xdfff],
  ];
  for (const [first = 0, last = 0] of ranges) {
    for (const code of [first, last]) {
      const name = code === 0x7f ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
      assert.equal(visible(`a${String.fromCodePoint(code)}b`), `a⟦${name}⟧b`);
    }
  }
  assert.equal(visible("a\ufe0f"), "a\ufe0f", "the usual selector of emoji");
});

test("a lone surrogate is seen, and a pair stays a character", () => {
  assert.equal(visible("\ud83d\ude00 \ud83d"), "😀 ⟦U+D83D⟧");
});

test("no text leaves a hidden character, whatever stands around it", () => {
  for (let code = 0; code <= 0xffff; code += 1) {
    const shown = visible(`a${String.fromCharCode(code)}b`);
    assert.ok(!/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/.test(shown), code.toString(16));
    assert.ok(shown.length >= 3);
  }
});

test("ordinary text in any script stays as it is", () => {
  const text = "Größe, 漢字, עברית, العربية, हिन्दी, ไทย — “quoted” ✓";
  assert.equal(visible(text), text);
});

test("one line shows line feeds and tabs as signs", () => {
  assert.equal(visibleLine("a\nb\tc"), "a↵b⇥c");
});

test("a cut does not split a pair", () => {
  assert.equal(shortened("ab😀cd", 3), "ab…");
  assert.equal(shortened("ab😀cd", 4), "ab😀…");
  assert.equal(shortened("abc", 3), "abc");
});

test("a fold counts lines and characters", () => {
  assert.equal(folded("a\nb\nc\nd", 2, 100), "a\nb\n…");
  assert.equal(folded("a\nb", 2, 100), "a\nb");
  assert.equal(folded("abcdef", 2, 3), "abc…");
  assert.equal(folded("\n".repeat(1_000_000), 3, 100), "\n\n\n…");
});
