/** The conversation, message by message, with tool calls and their outputs. */

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { Brief, Message, Messages, Page } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { usePages } from "../../state/pages";
import { useServices } from "../../state/services";
import { MessageCard } from "./MessageCard";

/** Messages of a call. */
const LIMIT = 50;
/** Characters of a message that come at once; a button brings more of it. */
export const CHARACTERS = 20_000;

export function Conversation({ brief, namespace, name }: { brief: Brief; namespace: string; name: string }): JSX.Element {
  const { calls } = useServices();
  const path = Calls.job(name, "rollouts", brief.id, "messages");
  const list = usePages<Message>(brief.id, async (cursor, signal): Promise<Page<Message>> => {
    const start = Number(cursor ?? 0);
    const page = await calls.get<Messages>(path, { namespace, start, limit: LIMIT, most: CHARACTERS }, signal);
    const end = start + page.items.length;
    return { items: page.items, metadata: { continue: page.items.length > 0 && end < page.total ? String(end) : null } };
  });
  const end = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = end.current;
    if (!element) return;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && list.next(), { rootMargin: "1500px" });
    observer.observe(element);
    return () => observer.disconnect();
  }, [list.items.length, list.next]);

  if (!list.ready) return <Waiting slow={list.slow} what="the conversation" />;
  if (list.problem && list.items.length === 0) return <Failure problem={list.problem} retry={list.reload} />;
  if (list.items.length === 0) {
    return (
      <Empty title="This rollout has no messages.">
        <p>It ended before its first turn. The timeline shows its attempts.</p>
      </Empty>
    );
  }
  return (
    <div class="conversation">
      {list.items.map((message, index) => (
        <MessageCard
          key={index}
          no={index}
          message={message}
          turn={message.turn === null ? undefined : brief.turns[message.turn]}
          more={(offset, limit) => calls.get(`${path}/${index}`, { namespace, offset, limit })}
        />
      ))}
      {list.problem ? <Failure problem={list.problem} retry={list.reload} /> : null}
      {list.more ? (
        <div ref={end}>
          <Waiting slow={true} what="more messages" />
        </div>
      ) : null}
    </div>
  );
}
