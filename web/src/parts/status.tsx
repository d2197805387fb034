/** States of rollouts and jobs: each has a colour, a mark and a name, so that colour is never the only carrier. */

import type { JSX } from "preact";
import { count } from "../text/format";
import { visibleLine } from "../text/visible";

export type Tone = "queued" | "active" | "good" | "bad" | "gone" | "warn";

const MARKS: Record<Tone, string> = { queued: "○", active: "▸", good: "✓", bad: "✕", gone: "–", warn: "!" };

/** Return the tone of a rollout's status, a job's phase or a pool's phase. */
export function toneOf(status: string): Tone {
  switch (status.toLowerCase()) {
    case "succeeded":
    case "ready":
    case "s":
    case "closed":
      return "good";
    case "failed":
    case "error":
    case "f":
    case "open":
      return "bad";
    case "cancelled":
    case "c":
    case "suspended":
      return "gone";
    case "leased":
    case "active":
    case "running":
    case "init":
    case "run":
    case "eval":
    case "l":
      return "active";
    case "degraded":
    case "late":
    case "paused":
    case "half_open":
      return "warn";
    default:
      return "queued";
  }
}

/** The name of a rollout's status as people say it. */
export function stateName(status: string): string {
  return status === "leased" ? "at work" : status === "queued" ? "waiting" : status;
}

export function Badge({ status, tone = toneOf(status) }: { status: string; tone?: Tone }): JSX.Element {
  return (
    <span class={`badge tone-${tone}`}>
      <span aria-hidden="true">{MARKS[tone]}</span> {visibleLine(status)}
    </span>
  );
}

export interface Part {
  name: string;
  n: number;
  tone: Tone;
}

/** A bar whose parts are as wide as their counts. Its text says the same. */
export function StateBar({ parts, label }: { parts: Part[]; label: string }): JSX.Element {
  const total = parts.reduce((sum, part) => sum + part.n, 0);
  const words = parts
    .filter((part) => part.n > 0)
    .map((part) => `${part.name} ${count(part.n)}`)
    .join(", ");
  return (
    <div class="statebar" role="img" aria-label={`${label}: ${words || "nothing yet"}`} title={words || "nothing yet"}>
      {parts.map((part) =>
        part.n > 0 ? (
          <span key={part.name} class={`fill-${part.tone}`} style={{ width: `${(100 * part.n) / Math.max(1, total)}%` }} />
        ) : null,
      )}
    </div>
  );
}

/** The names, marks and counts of a bar's parts. */
export function Legend({ parts }: { parts: Part[] }): JSX.Element {
  return (
    <ul class="legend">
      {parts.map((part) => (
        <li key={part.name}>
          <span class={`swatch fill-${part.tone}`} aria-hidden="true" />
          {part.name} <b>{count(part.n)}</b>
        </li>
      ))}
    </ul>
  );
}
