/** A scrolling list that draws only the rows that can be seen, and some around them. */

import type { ComponentChildren, JSX } from "preact";
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { windowOf } from "./maths";

/** Rows drawn above and below what is seen, unless a list says otherwise. */
const SPARE = 8;
/** The window moves in steps of so many rows, so that most frames of a scroll draw nothing. */
const STEP = 6;
/** So many rows before the end, further ones are asked for: a fast scroll should not have to wait for them. */
const AHEAD = 250;

export interface WindowedListProps {
  rows: number;
  rowHeight: number;
  row: (index: number) => ComponentChildren;
  label: string;
  spare?: number;
  /** Called when the last row is fewer than `AHEAD` rows away. */
  onEnd?: () => void;
  /** Called with the rows that can be seen, after they have changed. */
  onWindow?: (first: number, end: number) => void;
  role?: "grid" | "table" | "list" | "group" | "listbox";
  class?: string;
  header?: ComponentChildren;
  onKeyDown?: (event: KeyboardEvent) => void;
  onMouseMove?: (event: MouseEvent) => void;
  onClick?: (event: MouseEvent) => void;
  /** Where the scroll position is kept while the reader is elsewhere. */
  memory?: Map<string, number>;
  /** Receives the scrolling element. */
  holder?: { current: HTMLDivElement | null };
}

export function WindowedList(props: WindowedListProps): JSX.Element {
  const { rows, rowHeight } = props;
  const own = useRef<HTMLDivElement>(null);
  const holder = props.holder ?? own;
  const [view, setView] = useState({ top: 0, height: 600 });
  const frame = useRef(0);
  const latest = useRef(props);
  latest.current = props;

  const measure = useCallback(() => {
    frame.current = 0;
    const element = holder.current;
    if (!element) return;
    latest.current.memory?.set(latest.current.label, element.scrollTop);
    const top = Math.floor(element.scrollTop / (STEP * rowHeight)) * STEP * rowHeight;
    const height = Math.ceil(element.clientHeight / (STEP * rowHeight) + 1) * STEP * rowHeight;
    setView((before) => (before.top === top && before.height === height ? before : { top, height }));
  }, [holder, rowHeight]);

  // A reader who comes back finds the list where it was left, as soon as so many rows have been read again.
  const sought = useRef(props.memory?.get(props.label) ?? 0);
  useLayoutEffect(() => {
    const element = holder.current;
    if (element && sought.current > 0) {
      const goal = sought.current;
      if (rows * rowHeight >= goal + element.clientHeight || !latest.current.onEnd) {
        element.scrollTop = goal;
        sought.current = 0;
      } else {
        latest.current.onEnd();
      }
    }
    measure();
  }, [measure, rows]);
  useEffect(() => {
    const element = holder.current;
    if (!element) return;
    const ask = () => {
      if (frame.current === 0) frame.current = requestAnimationFrame(measure);
    };
    element.addEventListener("scroll", ask, { passive: true });
    const observer = new ResizeObserver(ask);
    observer.observe(element);
    return () => {
      element.removeEventListener("scroll", ask);
      observer.disconnect();
      cancelAnimationFrame(frame.current);
      frame.current = 0;
    };
  }, [holder, measure]);

  const shown = windowOf(rows, rowHeight, view.top, view.height, props.spare ?? SPARE);
  useEffect(() => {
    latest.current.onWindow?.(shown.first, shown.end);
    if (shown.end >= rows - AHEAD) latest.current.onEnd?.();
  }, [shown.first, shown.end, rows]);

  const drawn: ComponentChildren[] = [];
  for (let index = shown.first; index < shown.end; index += 1) drawn.push(props.row(index));
  const table = props.role === "grid" || props.role === "table";
  return (
    <div
      ref={holder}
      class={`windowed ${props.class ?? ""}`}
      role={props.role ?? "list"}
      aria-label={props.label}
      aria-rowcount={table ? rows + (props.header ? 1 : 0) : undefined}
      tabIndex={0}
      style={{ "--content": `${shown.height + (props.header ? rowHeight : 0) + 4}px` }}
      onKeyDown={props.onKeyDown}
      onMouseMove={props.onMouseMove}
      onClick={props.onClick}
    >
      {props.header}
      <div class="windowed-room" role={table ? "rowgroup" : "presentation"} style={{ height: `${shown.height}px` }}>
        <div class="windowed-rows" role="presentation" style={{ transform: `translateY(${shown.above}px)` }}>
          {drawn}
        </div>
      </div>
    </div>
  );
}
