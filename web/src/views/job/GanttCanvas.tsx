/** The timeline's canvas: it draws only the rows that can be seen. The list below it says the same as text. */

import type { JSX } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { GanttRow } from "../../api/types";
import { useLook } from "../../parts/Chart";
import { clock as clockText, duration } from "../../text/format";
import { visibleLine } from "../../text/visible";
import { STRAGGLER, rangeOf, tickStep, workOf } from "./ganttRows";

const ROW = 16;
const AXIS = 22;
const NAMES = 150;
const HEIGHT = 460;

export interface GanttCanvasProps {
  rows: GanttRow[];
  usual: number;
  /** Whether times are the clock's, or seconds from each rollout's start. */
  clock: boolean;
  holder: { current: HTMLDivElement | null };
  onOpen: (row: GanttRow) => void;
  onEnd: () => void;
}

export function GanttCanvas({ rows, usual, clock, holder, onOpen, onEnd }: GanttCanvasProps): JSX.Element {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [chosen, setChosen] = useState<number | null>(null);
  const range = useMemo(() => rangeOf(rows), [rows]);
  const look = useLook();
  const height = Math.min(HEIGHT, rows.length * ROW + AXIS);

  const draw = useCallback(() => {
    const element = canvas.current;
    const scroller = holder.current;
    const context = element?.getContext("2d");
    if (!element || !scroller || !context) return;
    const width = scroller.clientWidth;
    const scale = window.devicePixelRatio || 1;
    if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
      element.width = Math.round(width * scale);
      element.height = Math.round(height * scale);
      element.style.width = `${width}px`;
      element.style.height = `${height}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    paint(context, { rows, usual, clock, range, chosen, width, height, top: scroller.scrollTop });
  }, [rows, usual, clock, range, chosen, height, holder, look]);

  useEffect(() => {
    draw();
    const scroller = holder.current;
    if (!scroller) return;
    let frame = 0;
    const ask = () => {
      if (frame === 0) {
        frame = requestAnimationFrame(() => {
          frame = 0;
          draw();
        });
      }
      if (scroller.scrollTop + scroller.clientHeight > scroller.scrollHeight - 40 * ROW) onEnd();
    };
    scroller.addEventListener("scroll", ask, { passive: true });
    const observer = new ResizeObserver(ask);
    observer.observe(scroller);
    return () => {
      scroller.removeEventListener("scroll", ask);
      observer.disconnect();
      cancelAnimationFrame(frame);
    };
  }, [draw, holder, onEnd]);

  const rowAt = (event: MouseEvent): number | null => {
    const scroller = holder.current;
    if (!scroller) return null;
    const y = event.clientY - scroller.getBoundingClientRect().top - AXIS + scroller.scrollTop;
    const index = Math.floor(y / ROW);
    return index >= 0 && index < rows.length ? index : null;
  };
  const move = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 };
    const step = steps[event.key];
    if (step !== undefined) {
      event.preventDefault();
      const goal = Math.max(0, Math.min(rows.length - 1, (chosen ?? -1) + step));
      setChosen(goal);
      const scroller = holder.current;
      if (scroller) {
        const room = scroller.clientHeight - AXIS - ROW;
        scroller.scrollTop = Math.max(Math.min(scroller.scrollTop, goal * ROW), goal * ROW - room);
      }
    }
    const row = chosen === null ? undefined : rows[chosen];
    if (event.key === "Enter" && row) onOpen(row);
  };
  const row = chosen === null ? undefined : rows[chosen];
  return (
    <>
      <div
        class="gantt"
        ref={holder}
        style={{ height: `${height}px` }}
        tabIndex={0}
        role="application"
        aria-label="Timeline of rollouts. Arrow keys choose one, Enter opens it."
        aria-describedby="gantt-chosen"
        onKeyDown={move}
        onMouseMove={(event) => setChosen(rowAt(event))}
        onClick={(event) => {
          const index = rowAt(event);
          const hit = index === null ? undefined : rows[index];
          if (hit) onOpen(hit);
        }}
      >
        <canvas ref={canvas} aria-hidden="true" />
        <div class="gantt-room" style={{ height: `${rows.length * ROW + AXIS}px` }} />
      </div>
      <p id="gantt-chosen" class="gantt-chosen" aria-live="polite">
        {row ? wordsOf(row) : "Point at a row to see its stages."}
      </p>
    </>
  );
}

function wordsOf(row: GanttRow): string {
  const spans = row.spans.map(([name, start, end]) => `${name.replace("-queue", " queue")} ${duration(end - start)}`).join(" · ");
  return `${visibleLine(row.task_id)} #${row.sample}, ${row.status}${row.open ? ", not ended" : ""}: ${spans}`;
}

interface Picture {
  rows: GanttRow[];
  usual: number;
  clock: boolean;
  range: { start: number; end: number };
  chosen: number | null;
  width: number;
  height: number;
  top: number;
}

function paint(context: CanvasRenderingContext2D, picture: Picture): void {
  const { rows, usual, range, width, height, top } = picture;
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const names = width < 600 ? 70 : NAMES;
  const room = Math.max(10, width - names - 12);
  const x = (time: number) => names + ((time - range.start) / (range.end - range.start)) * room;
  const fills: Record<string, string> = { init: colour("--gantt-init"), run: colour("--gantt-run"), eval: colour("--gantt-eval") };
  const queue = colour("--gantt-queue");

  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  paintAxis(context, picture, x, names, colour("--line"), colour("--muted"));
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  const first = Math.max(0, Math.floor(top / ROW));
  const end = Math.min(rows.length, Math.ceil((top + height) / ROW));
  for (let index = first; index < end; index += 1) {
    const row = rows[index];
    if (!row) continue;
    const y = AXIS + index * ROW - top;
    if (index === picture.chosen) {
      context.fillStyle = colour("--hover");
      context.fillRect(0, y, width, ROW);
    }
    context.fillStyle = colour("--text");
    const straggles = usual > 0 && workOf(row) > STRAGGLER * usual;
    context.fillText(`${straggles ? "▲ " : ""}${visibleLine(row.task_id).slice(0, names < 100 ? 8 : 19)} #${row.sample}`, 4, y + ROW / 2, names - 8);
    for (const [name, start, stop] of row.spans) {
      const left = x(start);
      const wide = Math.max(1, x(stop) - left);
      const waits = name.endsWith("-queue");
      context.fillStyle = waits ? queue : (fills[name] ?? queue);
      // A wait is a thin line and work a thick bar, so that they differ without colour.
      context.fillRect(left, waits ? y + ROW / 2 - 1 : y + 3, wide, waits ? 2 : ROW - 6);
    }
    if (row.status === "failed") {
      context.fillStyle = colour("--bad");
      context.fillText("✕", Math.min(width - 10, x(row.spans.at(-1)?.[2] ?? range.start) + 2), y + ROW / 2);
    }
  }
  context.restore();
}

function paintAxis(context: CanvasRenderingContext2D, picture: Picture, x: (time: number) => number, names: number, line: string, text: string): void {
  const { range, width, height, clock } = picture;
  const step = tickStep(range.end - range.start, Math.max(2, Math.floor((width - names) / 110)));
  for (let time = clock ? Math.ceil(range.start / step) * step : range.start; time <= range.end; time += step) {
    const place = Math.round(x(time)) + 0.5;
    context.strokeStyle = line;
    context.beginPath();
    context.moveTo(place, AXIS - 4);
    context.lineTo(place, height);
    context.stroke();
    context.fillStyle = text;
    context.fillText(clock ? clockText(time) : duration(time - range.start), place + 3, AXIS / 2);
  }
}
