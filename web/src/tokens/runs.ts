/** Runs: values with the number of tokens in a row that have them. */

import type { Runs } from "../api/types";

/** Read single values out of runs, fast where the indices rise. */
export class RunReader<T> {
  readonly #values: T[] = [];
  readonly #ends: number[] = [];
  #last = 0;

  constructor(runs: Runs<T>) {
    let end = 0;
    for (const [value, length] of runs) {
      if (!(length > 0)) continue;
      end += length;
      this.#values.push(value);
      this.#ends.push(end);
    }
  }

  /** The number of tokens. */
  get length(): number {
    return this.#ends.at(-1) ?? 0;
  }

  /** Return the value at an index, or undefined past the end. */
  at(index: number): T | undefined {
    if (index < 0 || index >= this.length) return undefined;
    const start = this.#last > 0 ? (this.#ends[this.#last - 1] ?? 0) : 0;
    if (index < start) this.#last = 0;
    while (index >= (this.#ends[this.#last] ?? Infinity)) this.#last += 1;
    return this.#values[this.#last];
  }
}
