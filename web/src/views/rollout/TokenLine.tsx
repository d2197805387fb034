/** One line of tokens: neighbours that look the same share an element, so that a screen needs few of them. */

import type { JSX } from "preact";
import { visibleLine } from "../../text/visible";
import type { LoadedChunk, Row } from "../../tokens/layout";
import { drawn, lookRuns, tokenAt } from "../../tokens/lines";
import { shadeOf } from "../../tokens/logprobs";
import type { TokenStore } from "./tokenStore";
import type { TokenPlace } from "./TokensTab";

export type Colouring = "logprob" | "mask" | "version";

/** Versions have this many colours, which are used in turn. */
const VERSION_COLOURS = 5;

export interface TokenLineProps {
  row: Row;
  store: TokenStore;
  colouring: Colouring;
  selected: TokenPlace | null;
}

export function TokenLine({ row, store, colouring, selected }: TokenLineProps): JSX.Element {
  if (row.kind === "border") {
    return (
      <div class="token-line token-border">
        <span>{visibleLine(row.text)}</span>
      </div>
    );
  }
  const data = row.kind === "tokens" ? store.data(row.chunk) : undefined;
  const chunk = store.chunks[row.chunk];
  if (row.kind === "awaited" || !data || !chunk) return <div class="token-line token-awaited">…</div>;
  const chosen = selected && selected.segment === chunk.segment ? selected.position - chunk.start : -1;
  const runs = lookRuns(row.start, row.end, (index) => lookOf(data, index, colouring, index === chosen));
  return (
    <div class="token-line">
      {runs.map((run) => (
        <span key={run.start} class={run.look} data-chunk={row.chunk} data-start={run.start} data-end={run.end}>
          {textOf(data, run.start, run.end)}
        </span>
      ))}
    </div>
  );
}

function textOf(data: LoadedChunk, start: number, end: number): string {
  let text = "";
  for (let i = start; i < end; i += 1) text += drawn(data.texts[i] ?? "");
  return text;
}

function lookOf(data: LoadedChunk, index: number, colouring: Colouring, selected: boolean): string {
  const mark = selected ? " selected" : "";
  if (data.mask[index] !== 1) return `t${mark}`;
  if (colouring === "mask") return `t s mask${mark}`;
  if (colouring === "version") return `t s ver${hash(data.versions[data.versionOf[index] ?? 0] ?? "") % VERSION_COLOURS}${mark}`;
  return `t s lp${shadeOf(data.logprobs[index] ?? NaN)}${mark}`;
}

/** A number for a label, equal in all chunks. Labels that count up get different colours. */
function hash(label: string): number {
  const digits = /(\d{1,9})\D*$/.exec(label);
  if (digits) return Number(digits[1]);
  let value = 0;
  for (const character of label) value = (value * 31 + (character.codePointAt(0) ?? 0)) >>> 0;
  return value;
}

/** Return the token at the place of a mouse event, or null. */
export function tokenOfEvent(event: MouseEvent, store: TokenStore): TokenPlace | null {
  const element = (event.target as HTMLElement | null)?.closest<HTMLElement>("[data-start]");
  if (!element) return null;
  const chunkIndex = Number(element.dataset["chunk"]);
  const chunk = store.chunks[chunkIndex];
  const data = store.data(chunkIndex);
  if (!chunk || !data) return null;
  const run = { start: Number(element.dataset["start"]), end: Number(element.dataset["end"]) };
  const offset = offsetAt(event, element);
  return { segment: chunk.segment, position: chunk.start + tokenAt(data.texts, run, offset) };
}

/** The character of an element's text at the place of a mouse event. */
function offsetAt(event: MouseEvent, element: HTMLElement): number {
  const caret = caretAt(event.clientX, event.clientY);
  if (!caret || !element.contains(caret.node)) return 0;
  // A caret stands between characters, and behind the middle of one it stands after it.
  const { node, offset } = caret;
  const before = document.createRange();
  before.setStart(node, Math.max(0, offset - 1));
  before.setEnd(node, offset);
  const box = before.getBoundingClientRect();
  return offset > 0 && event.clientX < box.right ? offset - 1 : offset;
}

/** Where a caret would stand: browsers have two calls for it, and each has at least one of them. */
function caretAt(x: number, y: number): { node: Node; offset: number } | null {
  if (typeof document.caretPositionFromPoint === "function") {
    const position = document.caretPositionFromPoint(x, y);
    return position ? { node: position.offsetNode, offset: position.offset } : null;
  }
  const range = document.caretRangeFromPoint?.(x, y);
  return range ? { node: range.startContainer, offset: range.startOffset } : null;
}
