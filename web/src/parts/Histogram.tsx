/** A histogram of rewards: one bar a bin, each of which can be chosen as a filter. */

import type { JSX } from "preact";
import { count, reward } from "../text/format";

export interface HistogramProps {
  bins: number[];
  min: number;
  max: number;
  onChoose?: (from: number, to: number) => void;
}

export function Histogram({ bins, min, max, onChoose }: HistogramProps): JSX.Element {
  const most = Math.max(1, ...bins);
  const width = (max - min) / Math.max(1, bins.length);
  return (
    <div class="histogram">
      <div class="bars">
        {bins.map((n, index) => {
          const from = min + index * width;
          const to = index === bins.length - 1 ? max : from + width;
          const words = `reward ${reward(from)} to ${reward(to)}: ${count(n)} rollouts`;
          // A small count among large ones is still seen: a bar with anything in it has two pixels at least.
          const style = { height: n ? `max(2px, ${(100 * n) / most}%)` : "0" };
          return onChoose && n ? (
            <button key={index} type="button" class="bar" title={words} aria-label={`Show ${words}`} onClick={() => onChoose(from, to)}>
              <span class={`bar-fill shade-${shadeOfBin(index, bins.length)}`} style={style} />
            </button>
          ) : (
            <span key={index} class="bar" title={words}>
              <span class={`bar-fill shade-${shadeOfBin(index, bins.length)}`} style={style} />
            </span>
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
