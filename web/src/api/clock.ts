/** The server's clock: ages are differences to it, since the reader's clock may be wrong. */

/** The header Date has whole seconds, so smaller differences mean nothing. */
const COARSE_SECONDS = 2;

export class ServerClock {
  #offset = 0;

  /** Take the time of an answer's header Date. */
  heardDate(header: string | null): void {
    const time = header === null ? NaN : Date.parse(header) / 1000;
    if (Number.isFinite(time) && Math.abs(time - this.now()) > COARSE_SECONDS) this.heard(time);
  }

  /** Take an exact time of an answer, in seconds since the epoch. */
  heard(time: number): void {
    this.#offset = time - Date.now() / 1000;
  }

  /** Return the server's time in seconds since the epoch. */
  now(): number {
    return Date.now() / 1000 + this.#offset;
  }
}
