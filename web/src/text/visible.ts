/**
 * Text that a model, a tool or a user wrote, made safe to look at.
 *
 * The page shows such text only as text nodes, so markup in it is inert. What is left are characters that a browser
 * does not draw, or that change how others are drawn: they hide text or reverse it. `visible` replaces each of them
 * by something that can be seen.
 */

/** The names of the C0 controls. Unicode has pictures of them, which many monospaced fonts lack. */
const CONTROLS = (
  "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
).split(" ");

/**
 * C0 but tab and line feed, DEL and C1, soft hyphen, combining grapheme joiner, Arabic letter mark, fillers,
 * zero-width characters, marks and overrides of direction, invisible operators, annotation anchors, variation
 * selectors but the usual one of emoji, the byte order mark, tags, and lone surrogates.
 */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}\ud800-\udfff]/gu;

/** Return the text in which every character that hides or reorders others can be seen. */
export function visible(text: string): string {
  return text.replace(HIDDEN, mark);
}

/** As `visible`, on one line: line feeds and tabs become signs as well. */
export function visibleLine(text: string): string {
  return visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
}

/** Cut a text to at most so many lines and UTF-16 units. Return the text itself where it is short enough. */
export function folded(text: string, lines: number, most: number): string {
  let end = -1;
  for (let line = 0; line < lines; line += 1) {
    end = text.indexOf("\n", end + 1);
    if (end < 0 || end >= most) return shortened(text, most);
  }
  return end + 1 < text.length ? `${text.slice(0, end)}\n…` : text;
}

/** Cut a text to at most `most` UTF-16 units without splitting a pair, and say so with an ellipsis. */
export function shortened(text: string, most: number): string {
  if (text.length <= most) return text;
  const last = text.charCodeAt(most - 1);
  return `${text.slice(0, last >= 0xd800 && last <= 0xdbff ? most - 1 : most)}…`;
}

function mark(character: string): string {
  const code = character.codePointAt(0) ?? 0;
  const name = code === 0x7f ? "DEL" : CONTROLS[code];
  if (name !== undefined) return `\u27e6${name}\u27e7`;
  return `\u27e6U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e7`;
}
