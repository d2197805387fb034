/** The rows of the timeline: which rollouts are stragglers, and where a time lies in pixels. Everything is pure. */

import type { GanttRow } from "../../api/types";

/** A rollout that takes this many times the median is a straggler. */
export const STRAGGLER = 2;

export interface TimeRange {
  start: number;
  end: number;
}

export function spanOf(row: GanttRow): number {
  const first = row.spans[0]?.[1] ?? 0;
  const last = row.spans.at(-1)?.[2] ?? first;
  return last - first;
}

/** Return the seconds of work: what is spent in queues says nothing about a rollout. */
export function workOf(row: GanttRow): number {
  return row.spans.reduce((sum, [name, start, end]) => (name.endsWith("-queue") ? sum : sum + (end - start)), 0);
}

export function median(values: readonly number[]): number {
  if (values.length === 0) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? (sorted[middle] ?? 0) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}

/** Return the ids of rollouts that worked for much longer than others do, the longest first. */
export function stragglers(rows: readonly GanttRow[], usual: number): GanttRow[] {
  return rows.filter((row) => usual > 0 && workOf(row) > STRAGGLER * usual).sort((a, b) => workOf(b) - workOf(a));
}

/** Return the time from the first start to the last end; it has a length even where there is nothing. */
export function rangeOf(rows: readonly GanttRow[]): TimeRange {
  let start = Infinity;
  let end = -Infinity;
  for (const row of rows) {
    for (const [, from, to] of row.spans) {
      if (from < start) start = from;
      if (to > end) end = to;
    }
  }
  return end > start ? { start, end } : { start: Number.isFinite(start) ? start : 0, end: (Number.isFinite(start) ? start : 0) + 1 };
}

/** Return spans moved so that every rollout starts at zero. */
export function aligned(rows: readonly GanttRow[]): GanttRow[] {
  return rows.map((row) => {
    const first = row.spans[0]?.[1] ?? 0;
    return { ...row, spans: row.spans.map(([name, start, end]) => [name, start - first, end - first]) };
  });
}

/** Return round seconds between marks so that there are at most `most` of them in a range. */
export function tickStep(seconds: number, most: number): number {
  const steps = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 86_400];
  return steps.find((step) => seconds / step <= most) ?? Math.ceil(seconds / most / 86_400) * 86_400;
}
