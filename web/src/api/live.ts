/**
 * The page's one stream of events.
 *
 * It reconnects by itself, with growing waits, and rests while nobody can see the page. After each new connection
 * it says `open`, upon which views read again what they may have missed: at once after an interruption, and a
 * moment later at the beginning, when views have just been read and a second reading would only delay them.
 */

import type { JobRow, Overview, RolloutRow } from "./types";

export type LiveState = "connecting" | "open" | "reconnecting" | "resting";

export interface LiveEvents {
  open: null;
  overview: Partial<Overview>;
  job: JobRow;
  gone: { namespace: string; name: string };
  ended: { namespace: string; name: string; rollouts: RolloutRow[]; more?: number };
}

type Listener<K extends keyof LiveEvents> = (data: LiveEvents[K]) => void;

/** Milliseconds of the first wait before a new connection; each further wait is twice as long. */
const FIRST_WAIT = 1_000;
const LONGEST_WAIT = 15_000;
/** Milliseconds after the first connection until `open` is said. */
const SETTLE = 4_000;
/** Milliseconds after which the stream of a hidden page is closed. */
const HIDDEN_REST = 20_000;

export class Live {
  #source: EventSource | null = null;
  #listeners = new Map<string, Set<(data: never) => void>>();
  #stateListeners = new Set<(state: LiveState) => void>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #restTimer: ReturnType<typeof setTimeout> | undefined;
  #failures = 0;
  #interrupted = false;
  #stopped = false;
  #job: string | null = null;
  state: LiveState = "connecting";

  constructor(
    private readonly address: (job: string | null) => string,
    /** Called after a failed connection; it finds out whether the session is known. */
    private readonly onFailure: () => void,
  ) {
    document.addEventListener("visibilitychange", () => this.#visibility());
  }

  /** Follow one job, as in `namespace/name`, or with null the whole fleet. */
  follow(job: string | null): void {
    if (this.#source && job === this.#job) return;
    this.#job = job;
    this.#failures = 0;
    this.#stopped = false;
    this.#connect();
  }

  /** End the stream, as when the reader has no session. */
  stop(): void {
    this.#stopped = true;
    this.#close();
  }

  on<K extends keyof LiveEvents>(name: K, listener: Listener<K>): () => void {
    const set = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, set);
    set.add(listener as (data: never) => void);
    return () => void set.delete(listener as (data: never) => void);
  }

  onState(listener: (state: LiveState) => void): () => void {
    this.#stateListeners.add(listener);
    return () => void this.#stateListeners.delete(listener);
  }

  #connect(): void {
    this.#close();
    if (document.hidden) {
      this.#change("resting");
      return;
    }
    this.#change(this.#failures ? "reconnecting" : "connecting");
    const source = new EventSource(this.address(this.#job));
    this.#source = source;
    source.onopen = () => {
      const wait = this.#interrupted ? 0 : SETTLE;
      this.#failures = 0;
      this.#interrupted = false;
      this.#change("open");
      this.#timer = setTimeout(() => this.#tell("open", null), wait);
    };
    source.onerror = () => this.#failed();
    for (const name of ["overview", "job", "gone", "ended"] as const) {
      source.addEventListener(name, (event) => {
        const data = parsed((event as MessageEvent<string>).data);
        if (data !== null) this.#tell(name, data as never);
      });
    }
  }

  #failed(): void {
    this.#close();
    if (this.#stopped) return;
    this.#failures += 1;
    this.#interrupted = true;
    this.#change("reconnecting");
    const wait = Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** (this.#failures - 1));
    this.#timer = setTimeout(() => this.#connect(), wait * (0.75 + Math.random() / 2));
    this.onFailure();
  }

  #visibility(): void {
    clearTimeout(this.#restTimer);
    if (this.#stopped) return;
    if (document.hidden) {
      this.#restTimer = setTimeout(() => {
        this.#close();
        this.#interrupted = true;
        this.#change("resting");
      }, HIDDEN_REST);
    } else if (!this.#source) {
      this.#failures = 0;
      this.#connect();
    }
  }

  #close(): void {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  #change(state: LiveState): void {
    if (this.state === state) return;
    this.state = state;
    for (const listener of this.#stateListeners) listener(state);
  }

  #tell<K extends keyof LiveEvents>(name: K, data: LiveEvents[K]): void {
    for (const listener of this.#listeners.get(name) ?? []) (listener as Listener<K>)(data);
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
