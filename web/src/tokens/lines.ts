/**
 * Tokens broken into lines of equal height, and lines into runs of equal looks.
 *
 * A line ends after a token that ends with a line feed, and before a token that has no room. The text of one token
 * may span lines, as in a run of line feeds: it is drawn with signs in the place of line feeds, so that a token
 * stays on one line and the height of a line is known.
 */

import { visible } from "../text/visible";

/** A character cell is as wide as a Latin letter; a letter of East Asia takes two, and a combining mark none. */
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/gu;

/** A token longer than this many characters is cut in the view; its whole text is in the list of the selected token. */
export const MOST_TOKEN_TEXT = 200;

/** Return a token's text as it is drawn. */
export function drawn(text: string): string {
  const cut = text.length > MOST_TOKEN_TEXT ? `${text.slice(0, MOST_TOKEN_TEXT)}…` : text;
  return visible(cut).replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

/** Return the number of character cells of a text. */
export function cells(text: string): number {
  let wide = 0;
  // Latin text, which is nearly all of it, needs no second look.
  for (let i = 0; i < text.length; i += 1) {
    if (text.charCodeAt(i) >= 0x1100) {
      wide = text.match(WIDE)?.length ?? 0;
      break;
    }
  }
  return text.length + wide;
}

/**
 * Return the index of the first token of each line; a line ends where the next begins.
 *
 * Raises nothing: a token wider than the line has a line of its own.
 */
export function breakLines(texts: readonly string[], columns: number): number[] {
  const starts: number[] = [];
  let used = Infinity;
  for (let i = 0; i < texts.length; i += 1) {
    const text = texts[i] ?? "";
    const width = cells(drawn(text));
    if (used + width > columns) {
      starts.push(i);
      used = 0;
    }
    used += width;
    if (text.endsWith("\n")) used = Infinity;
  }
  return starts;
}

/** Some tokens in a row that look the same: one element draws them. */
export interface LookRun {
  start: number;
  end: number;
  look: string;
}

/** Group tokens `start` to `end` by their looks. */
export function lookRuns(start: number, end: number, lookOf: (index: number) => string): LookRun[] {
  const runs: LookRun[] = [];
  for (let i = start; i < end; i += 1) {
    const look = lookOf(i);
    const last = runs.at(-1);
    if (last && last.look === look) last.end = i + 1;
    else runs.push({ start: i, end: i + 1, look });
  }
  return runs;
}

/** Return which token of a run is drawn at a character of the run's text. */
export function tokenAt(texts: readonly string[], run: { start: number; end: number }, offset: number): number {
  let passed = 0;
  for (let i = run.start; i < run.end; i += 1) {
    passed += drawn(texts[i] ?? "").length;
    if (offset < passed) return i;
  }
  return run.end - 1;
}
