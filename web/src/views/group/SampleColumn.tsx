/** One sample of a group as a column: its figures and the beginning of its conversation. */

import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { Messages, RolloutRow } from "../../api/types";
import { Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Badge, stateName, toneOf } from "../../parts/status";
import { useResource } from "../../state/resource";
import { useServices } from "../../state/services";
import { brief, count, counted, duration, reward } from "../../text/format";
import { folded, shortened, visible, visibleLine } from "../../text/visible";
import { shadeOfReward } from "../job/GroupRow";

/** Messages, and characters and lines of each, that a column shows; the rollout's own view shows all of them. */
const MESSAGES = 16;
const CHARACTERS = 800;
const LINES = 12;

export interface SampleColumnProps {
  sample: RolloutRow;
  namespace: string;
  name: string;
  least: number;
  most: number;
}

export function SampleColumn({ sample, namespace, name, least, most }: SampleColumnProps): JSX.Element {
  const { calls, router } = useServices();
  const column = useRef<HTMLElement>(null);
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    const element = column.current;
    if (!element) return;
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) setSeen(true);
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const ended = sample.ended_at !== null;
  const messages = useResource<Messages>(seen && ended ? `messages ${sample.id}` : null, (signal) =>
    calls.get(Calls.job(name, "rollouts", sample.id, "messages"), { namespace, start: 0, limit: MESSAGES, most: CHARACTERS }, signal),
  );
  const href = router.href({ view: "rollout", namespace, name, id: sample.id });
  return (
    <article class="sample" ref={column} aria-label={`Sample ${sample.sample}`}>
      <header>
        <h3>
          <Link href={href}>Sample #{sample.sample}</Link>
        </h3>
        <span class={sample.reward === null ? "" : `reward-chip shade-${shadeOfReward(sample.reward, least, most)}`}>{reward(sample.reward)}</span>
        <Badge status={stateName(sample.status)} tone={toneOf(sample.status)} />
      </header>
      <p class="muted">
        {sample.reason ? `${visibleLine(sample.reason)}, ` : ""}
        {brief(sample.tokens)} tokens, {duration(sample.seconds)}
        {sample.attempts ? `, ${counted(sample.attempts, "failed attempt")}` : ""}
      </p>
      {!ended ? (
        <p>
          <Link href={href}>It has not ended: watch it</Link>
        </p>
      ) : null}
      {messages.problem ? <Failure problem={messages.problem} retry={messages.reload} /> : null}
      {seen && ended && !messages.data && !messages.problem ? <Waiting slow={messages.slow} what="messages" /> : null}
      {messages.data?.items.map((message, index) => (
        <div key={index} class={`mini role-${roleClass(message.role)}`}>
          <span class="mini-role">{visibleLine(shortened(message.role, 20))}</span>
          <div class="text">{visible(folded(message.content ?? "", LINES, CHARACTERS))}</div>
          {(message.tool_calls ?? []).map((call, place) => (
            <div key={place} class="mini-call mono">
              {visibleLine(shortened(call.name, 80))}({visibleLine(shortened(call.arguments, 200))})
            </div>
          ))}
        </div>
      ))}
      {messages.data && messages.data.total > messages.data.items.length ? (
        <p>
          <Link href={href}>{count(messages.data.total - messages.data.items.length)} more messages</Link>
        </p>
      ) : null}
    </article>
  );
}

/** A class for a role; a role that is not known has the look of no one in particular. */
export function roleClass(role: string): string {
  return ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
}
