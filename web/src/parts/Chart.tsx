/** Curves on a canvas, drawn by uPlot, with their last value and range as text. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { hourAndMinute } from "../text/format";
import "uplot/dist/uPlot.min.css";

export interface ChartProps {
  title: string;
  /** Seconds since the epoch, or numbers, rising. */
  xs: number[];
  ys: (number | null)[];
  /** Whether the horizontal axis is time. */
  time: boolean;
  height?: number;
  colour?: string;
  /** Labels of the horizontal axis, by index, in the place of numbers. */
  labels?: string[];
  format: (value: number) => string;
}

export function Chart(props: ChartProps): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const look = useLook();
  const height = props.height ?? 120;
  const kind = `${props.time} ${props.title} ${height} ${look}`;

  useEffect(() => {
    const element = holder.current;
    if (!element) return;
    const made = new uPlot(optionsOf(latest, element.clientWidth || 300, height), [latest.current.xs, latest.current.ys], element);
    chart.current = made;
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0 && element.clientWidth !== made.width) made.setSize({ width: element.clientWidth, height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      chart.current = null;
    };
  }, [kind]);

  useEffect(() => {
    chart.current?.setData([props.xs, props.ys]);
  }, [props.xs, props.ys]);

  return (
    <figure class="chart">
      <figcaption>
        {props.title} <span class="muted">{summaryOf(props)}</span>
      </figcaption>
      <div ref={holder} role="img" aria-label={`${props.title}: ${summaryOf(props)}`} />
    </figure>
  );
}

function summaryOf({ ys, format }: ChartProps): string {
  const known = ys.filter((value): value is number => value !== null);
  const last = known.at(-1);
  if (last === undefined) return "no values yet";
  let least = last;
  let most = last;
  for (const value of known) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return `${format(last)} now, ${format(least)} to ${format(most)}`;
}

function optionsOf(latest: { current: ChartProps }, width: number, height: number): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue("--muted").trim();
  const grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
  const stroke = style.getPropertyValue(latest.current.colour ?? "--accent").trim();
  const axis = { stroke: text, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const { time } = latest.current;
  const x: uPlot.Axis = { ...axis, size: 26, space: 70 };
  if (time) {
    x.values = (_, splits) => splits.map(hourAndMinute);
  } else {
    x.incrs = [1, 2, 5, 10, 20, 50, 100];
    x.values = (_, splits) => splits.map((value) => latest.current.labels?.[value] ?? String(value));
  }
  return {
    width,
    height,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time }, y: { range: (_, least, most) => rangeOf(least, most) } },
    series: [{}, { stroke, width: 1.5, spanGaps: true, points: { show: (_, __, from, to) => to - from < 40, size: 4, fill: stroke } }],
    axes: [x, { ...axis, size: 48, values: (_, splits) => splits.map((value) => latest.current.format(value)) }],
  };
}

/** A range with room on both sides; it begins at zero where all values are at least zero. */
function rangeOf(least: number | null, most: number | null): [number, number] {
  const low = Math.min(0, least ?? 0);
  const high = Math.max(low + 1e-9, most ?? 1);
  return [low, high === low + 1e-9 ? low + 1 : high + (high - low) * 0.08];
}

/** Return a word that changes with the theme, upon which colours of a canvas are read again. */
export function useLook(): string {
  const [look, set] = useState(0);
  useEffect(() => {
    const change = () => set((before) => before + 1);
    const observer = new MutationObserver(change);
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", change);
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", change);
    };
  }, []);
  return String(look);
}
