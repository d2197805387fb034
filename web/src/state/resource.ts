/** What a call answered, as the state of a view: slow calls show, failed ones can be repeated. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { CallError } from "../api/calls";
import { useLive } from "./services";

/** Milliseconds after which a reader is shown that something is awaited. */
export const SLOW = 300;

export interface Resource<T> {
  data: T | null;
  problem: CallError | null;
  /** Whether a call is under way for longer than `SLOW`. */
  slow: boolean;
  reload: () => void;
  /** Change the data without a call, as an event of the stream does. */
  patch: (change: (data: T) => T) => void;
}

/**
 * Return what `load` answers. A change of `key` asks again, and drops the answer before; a null key asks nothing.
 */
export function useResource<T>(key: string | null, load: (signal: AbortSignal) => Promise<T>): Resource<T> {
  const [state, set] = useState<{ key: string | null; data: T | null; problem: CallError | null }>({ key, data: null, problem: null });
  const [slow, setSlow] = useState(false);
  const current = useRef(load);
  current.current = load;
  const ask = useRef<() => void>(() => undefined);

  useEffect(() => {
    if (key === null) return;
    const controller = new AbortController();
    let busy = false;
    let again = false;
    const run = async () => {
      // A call that is under way is left to end: where answers take longer than events come, none would ever arrive.
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      const timer = setTimeout(() => setSlow(true), SLOW);
      try {
        const data = await current.current(controller.signal);
        if (!controller.signal.aborted) set({ key, data, problem: null });
      } catch (error) {
        if (controller.signal.aborted) return;
        set((before) => ({ key, data: before.key === key ? before.data : null, problem: asCallError(error) }));
      } finally {
        clearTimeout(timer);
        if (!controller.signal.aborted) setSlow(false);
        busy = false;
      }
      if (again && !controller.signal.aborted) {
        again = false;
        void run();
      }
    };
    ask.current = () => void run();
    void run();
    return () => {
      ask.current = () => undefined;
      setSlow(false);
      controller.abort();
    };
  }, [key]);

  const reload = useCallback(() => ask.current(), []);
  const patch = useCallback(
    (change: (data: T) => T) => set((before) => (before.data === null ? before : { ...before, data: change(before.data) })),
    [],
  );
  const known = state.key === key;
  return { data: known ? state.data : null, problem: known ? state.problem : null, slow, reload, patch };
}

export function asCallError(error: unknown): CallError {
  if (error instanceof CallError) return error;
  return new CallError(-1, "PageError", error instanceof Error ? error.message : String(error));
}

/** Return a function that calls `work` at most once in so many milliseconds, and not while nobody looks. */
export function useCoalesced(work: () => void, milliseconds: number): () => void {
  const current = useRef(work);
  current.current = work;
  const state = useRef<{ timer: ReturnType<typeof setTimeout> | undefined; last: number; missed: boolean }>({ timer: undefined, last: 0, missed: false });

  const ask = useCallback(() => {
    const now = state.current;
    if (document.hidden) {
      now.missed = true;
      return;
    }
    if (now.timer !== undefined) return;
    const wait = Math.max(0, now.last + milliseconds - Date.now());
    now.timer = setTimeout(() => {
      now.timer = undefined;
      now.last = Date.now();
      current.current();
    }, wait);
  }, [milliseconds]);

  useEffect(() => {
    const seen = () => {
      if (document.hidden || !state.current.missed) return;
      state.current.missed = false;
      ask();
    };
    document.addEventListener("visibilitychange", seen);
    return () => {
      document.removeEventListener("visibilitychange", seen);
      clearTimeout(state.current.timer);
      state.current.timer = undefined;
    };
  }, [ask]);
  return ask;
}

/**
 * Ask again when something of a job has changed, and after each new connection, but not oftener than once in so many
 * milliseconds; and at once when the job has ended, since nothing comes after that.
 */
export function useJobRefresh(namespace: string, name: string, reload: () => void, milliseconds: number): void {
  const ask = useCoalesced(reload, milliseconds);
  const finished = useRef(false);
  useLive("job", (job) => {
    if (job.namespace !== namespace || job.name !== name) return;
    if (job.finished_at !== null && !finished.current) {
      finished.current = true;
      reload();
    } else {
      ask();
    }
  }, [namespace, name, ask, reload]);
  useLive("ended", (ended) => {
    if (ended.namespace === namespace && ended.name === name) ask();
  }, [namespace, name, ask]);
  useReopened(ask);
}

/** Call `reload` when the stream is open again: what happened in between was missed. */
export function useReopened(reload: () => void): void {
  useLive("open", reload, [reload]);
}
