/**
 * Where each token of a trajectory is drawn: chunks of tokens, chunks as rows, and rows as one long list.
 *
 * A chunk that was not read yet has as many rows as are expected of it. When it arrives and has more or fewer,
 * what lies below moves; the view moves its scroll position along if the chunk lies above.
 */

import type { Tokens } from "../api/types";
import { breakLines } from "./lines";
import { logprobsOf } from "./logprobs";
import { RunReader } from "./runs";

/** Tokens of a chunk: one call reads it. */
export const CHUNK = 4_096;

/** Some tokens of one segment, all of them prompt or all of them response. */
export interface Chunk {
  segment: number;
  /** Positions from the segment's first prompt token. */
  start: number;
  end: number;
  /** What stands above the chunk, where a segment or its response begins. */
  border: string | null;
}

export interface LoadedChunk {
  ids: number[];
  texts: string[];
  /** Whether `texts` are ids, since no tokenizer was at hand. */
  textless: string | null;
  mask: Uint8Array;
  versions: string[];
  /** For each token, the index of its version in `versions`; 0 is none. */
  versionOf: Uint16Array;
  logprobs: Float32Array;
}

export type Row = { kind: "tokens"; chunk: number; start: number; end: number } | { kind: "border"; text: string } | { kind: "awaited"; chunk: number };

/** The tokens of a segment, and what is said of it. */
export interface SegmentShape {
  prompt: number;
  response: number;
  name?: string | null;
}

/** Cut segments into chunks. Prompt and response never share one, since a border stands between them. */
export function chunksOf(segments: readonly SegmentShape[]): Chunk[] {
  const chunks: Chunk[] = [];
  segments.forEach(({ prompt, response, name: said }, segment) => {
    const name = segments.length > 1 ? `Segment ${segment + 1} of ${segments.length}${said ? `, ${said}` : ""}: ` : "";
    const add = (from: number, to: number, border: string) => {
      for (let start = from; start < to; start += CHUNK) {
        chunks.push({ segment, start, end: Math.min(to, start + CHUNK), border: start === from ? border : null });
      }
    };
    add(0, prompt, `${name}prompt, ${prompt} tokens`);
    add(prompt, prompt + response, `${name}response, ${response} tokens`);
  });
  return chunks;
}

/** Decode an answer; indices of the result are relative to the chunk's start. */
export function loaded(answer: Tokens): LoadedChunk {
  const n = answer.ids.length;
  const masks = new RunReader(answer.mask);
  const labels = new RunReader(answer.versions);
  const mask = new Uint8Array(n);
  const versions = [""];
  const known = new Map([["", 0]]);
  const versionOf = new Uint16Array(n);
  for (let i = 0; i < n; i += 1) {
    mask[i] = masks.at(i) ?? 0;
    const label = labels.at(i) ?? "";
    let index = known.get(label);
    if (index === undefined) {
      index = versions.length;
      versions.push(label);
      known.set(label, index);
    }
    versionOf[i] = index;
  }
  const texts = answer.texts ?? answer.ids.map((id) => `${id} `);
  const textless = answer.texts ? null : answer.texts_reason || "The control plane has no tokenizer of this pool.";
  return { ids: answer.ids, texts, textless, mask, versions, versionOf, logprobs: logprobsOf(answer.logprobs) };
}

/** Return a chunk's rows. A row says so where the policy version changes between sampled tokens. */
export function rowsOf(chunk: Chunk, index: number, data: LoadedChunk, columns: number, before: string): Row[] {
  const rows: Row[] = chunk.border === null ? [] : [{ kind: "border", text: chunk.border }];
  const cuts: { at: number; version: string }[] = [];
  let version = before;
  for (let i = 0; i < data.ids.length; i += 1) {
    const label = data.versions[data.versionOf[i] ?? 0] ?? "";
    if (label !== "" && label !== version) {
      cuts.push({ at: i, version: label });
      version = label;
    }
  }
  let from = 0;
  const add = (to: number) => {
    const part = from === 0 && to === data.texts.length ? data.texts : data.texts.slice(from, to);
    const starts = breakLines(part, columns);
    starts.forEach((start, place) => {
      rows.push({ kind: "tokens", chunk: index, start: from + start, end: from + (starts[place + 1] ?? part.length) });
    });
    from = to;
  };
  for (const cut of cuts) {
    if (cut.at > from) add(cut.at);
    rows.push({ kind: "border", text: `Policy version ${cut.version}` });
  }
  if (from < data.texts.length) add(data.texts.length);
  return rows;
}

/** Return the last version of a chunk's sampled tokens, or the one before it. */
export function lastVersion(data: LoadedChunk, before: string): string {
  for (let i = data.ids.length - 1; i >= 0; i -= 1) {
    const label = data.versions[data.versionOf[i] ?? 0] ?? "";
    if (label !== "") return label;
  }
  return before;
}

/** The list of all rows: those of chunks that were read, and places for the others. */
export class TokenRows {
  readonly #counts: number[];
  readonly #rows = new Map<number, Row[]>();
  #sums: number[] | null = null;

  constructor(
    readonly chunks: readonly Chunk[],
    /** Tokens that a line is expected to have. */
    perLine: number,
  ) {
    this.#counts = chunks.map((chunk) => (chunk.border === null ? 0 : 1) + Math.max(1, Math.ceil((chunk.end - chunk.start) / perLine)));
  }

  get length(): number {
    return this.#starts().at(-1) ?? 0;
  }

  /** Put a chunk's rows in the place of those that were expected, and return how many more there are. */
  put(chunk: number, rows: Row[]): number {
    const more = rows.length - (this.#counts[chunk] ?? 0);
    this.#rows.set(chunk, rows);
    this.#counts[chunk] = rows.length;
    this.#sums = null;
    return more;
  }

  /** Forget a chunk's rows, though not how many there are. */
  drop(chunk: number): void {
    this.#rows.delete(chunk);
  }

  has(chunk: number): boolean {
    return this.#rows.has(chunk);
  }

  /** Return the first row of a chunk. */
  startOf(chunk: number): number {
    return chunk === 0 ? 0 : (this.#starts()[chunk - 1] ?? 0);
  }

  /** Return the chunk in which a row lies. */
  chunkAt(row: number): number {
    const sums = this.#starts();
    let low = 0;
    let high = sums.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((sums[middle] ?? 0) > row) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  at(row: number): Row {
    const chunk = this.chunkAt(row);
    const rows = this.#rows.get(chunk);
    return rows?.[row - this.startOf(chunk)] ?? { kind: "awaited", chunk };
  }

  /** Return the row of a token of a chunk that was read, or the chunk's first row. */
  rowOf(chunk: number, token: number): number {
    const rows = this.#rows.get(chunk) ?? [];
    const found = rows.findIndex((row) => row.kind === "tokens" && token >= row.start && token < row.end);
    return this.startOf(chunk) + Math.max(0, found);
  }

  /** Return the chunk of a position in a segment, or −1. */
  find(segment: number, position: number): number {
    return this.chunks.findIndex((chunk) => chunk.segment === segment && position >= chunk.start && position < chunk.end);
  }

  #starts(): number[] {
    if (this.#sums === null) {
      let sum = 0;
      this.#sums = this.#counts.map((count) => (sum += count));
    }
    return this.#sums;
  }
}
