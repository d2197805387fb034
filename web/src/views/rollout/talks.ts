/** The conversations of a rollout: its own one first, then the branches. Everything here is pure. */

import type { Brief, Turn } from "../../api/types";

export interface Talk {
  number: number;
  kind: string;
  own: boolean;
  trained: boolean;
  parent: number | null;
  /** How many messages of the parent precede its own messages. */
  shared: number;
  messages: number;
  turns: Turn[];
  /** The number of turns; `turns` holds the first of them. */
  turnsTotal: number;
}

/** A message of a conversation, or a conversation as a whole. */
export interface TalkPlace {
  number: number;
  message: number | null;
}

/** Return all conversations. A rollout of another agent has one. */
export function talksOf(brief: Brief): Talk[] {
  const own: Talk = {
    number: brief.conversation,
    kind: "main",
    own: true,
    trained: brief.turns.some((turn) => (brief.segments[turn.segment]?.sampled ?? 0) > 0),
    parent: brief.continues,
    shared: 0,
    messages: brief.messages,
    turns: brief.turns,
    turnsTotal: brief.turns_total ?? brief.turns.length,
  };
  return [own, ...brief.branches.map(({ turns_total, ...branch }) => ({ ...branch, own: false, turnsTotal: turns_total ?? branch.turns.length }))];
}

/**
 * Return the last message before a conversation left its parent, in the conversation that has it: a parent that
 * had itself left another one has only the messages after that.
 */
export function leftAt(talks: readonly Talk[], talk: Talk): TalkPlace | null {
  if (talk.parent === null) return null;
  const message = talk.shared - 1;
  let number: number | null = talk.parent;
  // A parent has a smaller number, so this ends.
  for (;;) {
    const parent = talks.find((one) => one.number === number);
    if (!parent || talk.shared === 0) return { number: talk.parent, message: null };
    if (message >= parent.shared || parent.parent === null || parent.own) return { number: parent.number, message: message - parent.shared };
    number = parent.parent;
  }
}

const NAMES = new Map([
  ["main", "another version of the main conversation"],
  ["subagent", "sub-agent"],
  ["policy", "calls of the policy itself"],
]);

/** What a conversation is, in words. */
export function talkName(talk: Talk): string {
  return `${talk.number}: ${talk.own ? "own conversation" : (NAMES.get(talk.kind) ?? talk.kind)}`;
}

/** Return for each segment what the token view says of it, or null if the rollout has one conversation. */
export function segmentNames(brief: Brief): (string | null)[] {
  const names: (string | null)[] = brief.segments.map(() => null);
  if (brief.branches.length === 0) return names;
  for (const talk of talksOf(brief)) {
    for (const { segment } of talk.turns) {
      if (segment < names.length) names[segment] = `conversation ${talkName(talk)}${talk.trained ? "" : ", not trained on"}`;
    }
  }
  return names;
}
