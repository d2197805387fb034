/** A histogram of rewards. Bars that are side by side make one button, which is large enough for a finger. */

import type { JSX } from "preact";
import { count, reward } from "../text/format";

export interface HistogramProps {
  bins: number[];
  min: number;
  max: number;
  onChoose: (from: number, to: number) => void;
}

/** Bars that share a button. */
const SHARED = 2;

export function Histogram({ bins, min, max, onChoose }: HistogramProps): JSX.Element {
  const most = Math.max(1, ...bins);
  const width = (max - min) / Math.max(1, bins.length);
  const edge = (index: number) => (index >= bins.length ? max : min + index * width);
  const starts = bins.map((_, index) => index).filter((index) => index % SHARED === 0);
  return (
    <div class="histogram">
      <div class="bars">
        {starts.map((start) => {
          const part = bins.slice(start, start + SHARED);
          const n = part.reduce((sum, bin) => sum + bin, 0);
          const from = edge(start);
          const to = edge(start + part.length);
          const words = `reward ${reward(from)} to ${reward(to)}: ${count(n)} rollouts`;
          return (
            <button key={start} type="button" class="bar" title={words} aria-label={`Show ${words}`} disabled={n === 0} onClick={() => onChoose(from, to)}>
              {part.map((bin, index) => (
                // A small count among large ones is still seen: a bar with anything in it has two pixels at least.
                <span
                  key={index}
                  class={`bar-fill shade-${shadeOfBin(start + index, bins.length)}`}
                  style={{ height: bin ? `max(2px, ${(100 * bin) / most}%)` : "0" }}
                />
              ))}
            </button>
          );
        })}
      </div>
      <div class="axis">
        <span>{reward(min)}</span>
        <span>{reward((min + max) / 2)}</span>
        <span>{reward(max)}</span>
      </div>
    </div>
  );
}

function shadeOfBin(index: number, bins: number): number {
  return bins < 2 ? 10 : Math.round((10 * index) / (bins - 1));
}
