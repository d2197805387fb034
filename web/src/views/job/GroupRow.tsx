/** One group in the grid. */

import type { JSX } from "preact";
import { Component } from "preact";
import type { GridRow, GridSample } from "../../api/types";
import { Link } from "../../parts/Link";
import { ServicesContext, type Services } from "../../state/services";
import { reward, tinyReward } from "../../text/format";
import { shortened, visible, visibleLine } from "../../text/visible";

/** Pixels; the style sheet says the same. */
export const GROUP_ROW_HEIGHT = 26;
/** Samples that have a cell; a link counts the others. */
const MOST_CELLS = 64;
/** Groups with more samples than this have small cells without numbers. */
const MOST_NUMBERED = 16;

const MARKS: Record<string, string> = { q: "·", l: "▸", f: "✕", c: "–", s: "✓" };
const WORDS: Record<string, string> = { q: "waiting", l: "at work", f: "failed", c: "cancelled", s: "succeeded" };

export interface GroupRowProps {
  group: GridRow;
  index: number;
  namespace: string;
  name: string;
  least: number;
  most: number;
}

/** Return the shade of a reward, from 0 for the least to 10 for the most. */
export function shadeOfReward(value: number, least: number, most: number): number {
  if (!(most > least)) return value > 0 ? 10 : 0;
  return Math.max(0, Math.min(10, Math.round((10 * (value - least)) / (most - least))));
}

/** A row is drawn again only when its group has changed: scrolling moves thousands of them. */
export class GroupRow extends Component<GroupRowProps> {
  static override contextType = ServicesContext;

  override shouldComponentUpdate(next: GroupRowProps): boolean {
    const now = this.props;
    return now.group !== next.group || now.index !== next.index || now.least !== next.least || now.most !== next.most;
  }

  override render({ group, index, namespace, name, least, most }: GroupRowProps): JSX.Element {
    const { router } = this.context as Services;
    const href = router.href({ view: "group", namespace, name, task: group.task_id });
    const small = group.samples.length > MOST_NUMBERED;
    return (
      <div class="grid-row" role="row" aria-rowindex={index + 2} data-row={index}>
        <span role="gridcell" class="number muted">
          {group.no}
        </span>
        <span role="gridcell" class="clip" title={visible(group.task_id)}>
          <Link href={href} tabIndex={-1} data="task">
            {visibleLine(shortened(group.task_id, 120)) || "(no name)"}
          </Link>
        </span>
        <span role="gridcell">
          {group.informative ? (
            <span class="informative" title="Rewards differ within the group">
              ◆<span class="visually-hidden"> informative</span>
            </span>
          ) : null}
        </span>
        <span role="gridcell" class="muted clip" title={visible(group.reason)}>
          {group.reason ? visibleLine(group.reason) : group.state}
        </span>
        <span role="gridcell" class="number">
          {reward(group.mean)}
        </span>
        <span class={small ? "cells small" : "cells"} role="gridcell">
          {group.samples.slice(0, MOST_CELLS).map((sample, place) => (
            <a
              key={sample[0]}
              href={router.href({ view: "rollout", namespace, name, id: sample[0] })}
              class={`cell ${lookOf(sample, least, most)}`}
              title={`sample ${place}: ${wordsOf(sample)}`}
              tabIndex={-1}
              data-key="sample"
            >
              {small ? "" : markOf(sample)}
            </a>
          ))}
          {group.samples.length > MOST_CELLS ? (
            <Link href={href} tabIndex={-1}>
              {`+${group.samples.length - MOST_CELLS}`}
            </Link>
          ) : null}
        </span>
      </div>
    );
  }
}

function lookOf([, letter, value]: GridSample, least: number, most: number): string {
  return value === null ? `cell-${letter}` : `shade-${shadeOfReward(value, least, most)}`;
}

function markOf([, letter, value]: GridSample): string {
  return value === null ? (MARKS[letter] ?? "?") : tinyReward(value);
}

function wordsOf([, letter, value]: GridSample): string {
  const state = WORDS[letter] ?? letter;
  return value === null ? state : `${state}, reward ${reward(value)}`;
}
