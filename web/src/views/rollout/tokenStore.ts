/** The tokens of one trajectory as far as they were read, and their rows at the present width. */

import type { Tokens } from "../../api/types";
import { type Chunk, type LoadedChunk, type SegmentShape, TokenRows, chunksOf, lastVersion, loaded, rowsOf } from "../../tokens/layout";

/** Chunks that are kept; with 4,096 tokens each, these are about 260,000 tokens. */
const MOST_CHUNKS = 64;
/** Calls at once. */
const MOST_CALLS = 2;
/** Tokens that a line of a hundred cells has in usual text. */
const USUAL_PER_CELL = 0.22;

export type ReadTokens = (chunk: Chunk, signal: AbortSignal) => Promise<Tokens>;

export class TokenStore {
  readonly chunks: Chunk[];
  rows: TokenRows;
  readonly #data = new Map<number, LoadedChunk>();
  readonly #calls = new Map<number, AbortController>();
  #columns: number;

  constructor(
    segments: readonly SegmentShape[],
    columns: number,
    private readonly read: ReadTokens,
    /** Called when a chunk has come: with its first row, and how many more rows there are than were expected. */
    private readonly onRows: (first: number, more: number) => void,
    private readonly onProblem: (error: unknown) => void,
  ) {
    this.#columns = columns;
    this.chunks = chunksOf(segments);
    this.rows = new TokenRows(this.chunks, columns * USUAL_PER_CELL);
  }

  data(chunk: number): LoadedChunk | undefined {
    return this.#data.get(chunk);
  }

  /** Break all lines again for another width. */
  resize(columns: number): void {
    if (columns === this.#columns) return;
    this.#columns = columns;
    this.rows = new TokenRows(this.chunks, columns * USUAL_PER_CELL);
    for (const index of this.#data.keys()) this.#layOut(index);
  }

  /** Read the chunks of some rows, and give up calls for others. */
  want(first: number, end: number): void {
    if (this.chunks.length === 0) return;
    const from = this.rows.chunkAt(first);
    const to = this.rows.chunkAt(Math.max(first, end - 1));
    for (const [index, call] of this.#calls) {
      if (index < from - 1 || index > to + 1) call.abort();
    }
    for (let index = from; index <= to; index += 1) this.#start(index);
  }

  /** Read one chunk, and resolve when it is there. */
  async need(index: number): Promise<void> {
    this.#start(index, true);
    while (!this.#data.has(index) && this.#calls.has(index)) await new Promise((resolve) => setTimeout(resolve, 20));
  }

  /** Give up all calls. */
  close(): void {
    for (const call of this.#calls.values()) call.abort();
    this.#calls.clear();
  }

  #start(index: number, urgent = false): void {
    const chunk = this.chunks[index];
    if (!chunk || this.#data.has(index) || this.#calls.has(index)) return;
    if (this.#calls.size >= MOST_CALLS && !urgent) return;
    const controller = new AbortController();
    this.#calls.set(index, controller);
    this.read(chunk, controller.signal)
      .then((answer) => {
        if (controller.signal.aborted) return;
        this.#calls.delete(index);
        this.#data.set(index, loaded(answer));
        this.#forget(index);
        const first = this.rows.startOf(index);
        this.onRows(first, this.#layOut(index));
      })
      .catch((error: unknown) => {
        if (this.#calls.get(index) === controller) this.#calls.delete(index);
        if (!controller.signal.aborted) this.onProblem(error);
      });
  }

  #layOut(index: number): number {
    const chunk = this.chunks[index];
    const data = this.#data.get(index);
    if (!chunk || !data) return 0;
    const before = this.#data.get(index - 1);
    const known = before && this.chunks[index - 1]?.segment === chunk.segment ? lastVersion(before, "") : "";
    return this.rows.put(index, rowsOf(chunk, index, data, this.#columns, known));
  }

  /** Drop the chunk that is farthest from the one that has come, when there are too many. */
  #forget(index: number): void {
    if (this.#data.size <= MOST_CHUNKS) return;
    const farthest = [...this.#data.keys()].reduce((a, b) => (Math.abs(a - index) > Math.abs(b - index) ? a : b));
    this.#data.delete(farthest);
    this.rows.drop(farthest);
  }
}
