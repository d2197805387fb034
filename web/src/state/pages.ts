/** A long list that the server sorts and filters, read page by page as the reader scrolls. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { CallError } from "../api/calls";
import type { Page } from "../api/types";
import { SLOW, asCallError } from "./resource";

export interface PagedList<T> {
  items: T[];
  /** Whether the server has more. */
  more: boolean;
  /** Whether the first page has come. */
  ready: boolean;
  slow: boolean;
  problem: CallError | null;
  /** Read the next page, unless one is being read. */
  next: () => void;
  /** Read from the first page on again; what is shown stays until the answer comes. */
  reload: () => void;
  /**
   * Read again the page that an item lies in. It is of use where the order does not change, as that of submission.
   */
  refreshAt: (index: number) => void;
  patch: (change: (items: T[]) => T[]) => void;
}

interface State<T> {
  key: string;
  items: T[];
  cursor: string | null;
  /** The cursor by which each page was read, and the index of its first item. */
  pages: { cursor: string | null; start: number }[];
  ready: boolean;
  problem: CallError | null;
}

/** Return the list that `load` reads. A change of `key`, which holds sort and filters, begins it again. */
export function usePages<T>(key: string, load: (cursor: string | null, signal: AbortSignal) => Promise<Page<T>>): PagedList<T> {
  const empty: State<T> = { key, items: [], cursor: null, pages: [], ready: false, problem: null };
  const [state, set] = useState(empty);
  const [slow, setSlow] = useState(false);
  const loader = useRef(load);
  loader.current = load;
  const busy = useRef<AbortController | null>(null);
  const again = useRef(false);
  const latest = useRef(state);
  latest.current = state;

  const read = useCallback(async (forKey: string, cursor: string | null) => {
    const controller = new AbortController();
    busy.current = controller;
    const timer = setTimeout(() => setSlow(true), SLOW);
    try {
      const page = await loader.current(cursor, controller.signal);
      if (controller.signal.aborted) return;
      set((before) => ({
        key: forKey,
        items: cursor === null ? page.items : before.items.concat(page.items),
        cursor: page.metadata.continue || null,
        pages: cursor === null ? [{ cursor, start: 0 }] : [...before.pages, { cursor, start: before.items.length }],
        ready: true,
        problem: null,
      }));
    } catch (error) {
      if (!controller.signal.aborted) set((before) => ({ ...before, key: forKey, ready: true, problem: asCallError(error) }));
    } finally {
      clearTimeout(timer);
      if (busy.current === controller) {
        busy.current = null;
        setSlow(false);
      }
    }
    if (again.current && busy.current === null && !controller.signal.aborted) {
      again.current = false;
      void read(forKey, null);
    }
  }, []);

  useEffect(() => {
    if (latest.current.key !== key) set({ key, items: [], cursor: null, pages: [], ready: false, problem: null });
    again.current = false;
    void read(key, null);
    return () => {
      busy.current?.abort();
      busy.current = null;
    };
  }, [key, read]);

  const next = useCallback(() => {
    const now = latest.current;
    if (busy.current === null && now.cursor !== null && now.problem === null) void read(now.key, now.cursor);
  }, [read]);
  const reload = useCallback(() => {
    // As with a single resource, a page that is being read is left to come first.
    if (busy.current === null) void read(latest.current.key, null);
    else again.current = true;
  }, [read]);
  const refreshAt = useCallback((index: number) => {
    const { key: forKey, items, pages } = latest.current;
    const place = pages.findLastIndex((page) => page.start <= index);
    const page = pages[place];
    if (!page || busy.current !== null) return;
    const controller = new AbortController();
    busy.current = controller;
    const length = (pages[place + 1]?.start ?? items.length) - page.start;
    loader
      .current(page.cursor, controller.signal)
      .then((fresh) => {
        if (controller.signal.aborted || fresh.items.length !== length) return;
        set((before) => (before.key === forKey ? { ...before, items: before.items.toSpliced(page.start, length, ...fresh.items) } : before));
      })
      .catch(() => {
        // What is shown stays; the next reading of the list says what is wrong.
      })
      .finally(() => {
        if (busy.current === controller) busy.current = null;
      });
  }, []);
  const patch = useCallback((change: (items: T[]) => T[]) => set((before) => ({ ...before, items: change(before.items) })), []);
  const shown = state.key === key ? state : empty;
  return { items: shown.items, more: shown.cursor !== null, ready: shown.ready, slow, problem: shown.problem, next, reload, refreshAt, patch };
}
