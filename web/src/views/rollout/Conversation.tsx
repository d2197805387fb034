/** The conversations of a rollout: one of them message by message, with tool calls and their outputs. */

import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { Brief, Message, Messages, Page } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { usePages } from "../../state/pages";
import { wholeOf } from "../../state/place";
import { useLocation, useServices } from "../../state/services";
import { type Talk, talksOf } from "./talks";
import { Branches } from "./Branches";
import { HarnessPanel } from "./HarnessPanel";
import { MessageCard, messageId } from "./MessageCard";

/** Messages of a call. */
const LIMIT = 50;
/** Characters of a message that come at once; a button brings more of it. */
export const CHARACTERS = 20_000;

export function Conversations({ brief, namespace, name }: { brief: Brief; namespace: string; name: string }): JSX.Element {
  const { query } = useLocation();
  const talks = talksOf(brief);
  const number = wholeOf(query, "conversation", 0, 1e10);
  const shown = talks.find((talk) => talk.number === number) ?? (talks[0] as Talk);
  return (
    <>
      {brief.harness ? <HarnessPanel harness={brief.harness} /> : null}
      {talks.length > 1 ? <Branches brief={brief} namespace={namespace} name={name} talks={talks} shown={shown} /> : null}
      <Conversation
        key={shown.number}
        id={brief.id}
        talk={shown}
        giver={brief.harness ? "harness" : "task"}
        namespace={namespace}
        name={name}
        chosen={wholeOf(query, "message", 0, 1e6)}
      />
    </>
  );
}

interface ConversationProps {
  id: string;
  talk: Talk;
  giver: string;
  namespace: string;
  name: string;
  /** The message that is scrolled to. */
  chosen: number | null;
}

function Conversation({ id, talk, giver, namespace, name, chosen }: ConversationProps): JSX.Element {
  const { calls } = useServices();
  const path = Calls.job(name, "rollouts", id, "messages");
  const conversation = talk.own ? null : talk.number;
  const list = usePages<Message>(`${id} ${talk.number}`, async (cursor, signal): Promise<Page<Message>> => {
    const start = Number(cursor ?? 0);
    const page = await calls.get<Messages>(path, { namespace, conversation, start, limit: LIMIT, most: CHARACTERS }, signal);
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
  useEffect(() => {
    if (chosen === null || !list.ready) return;
    if (chosen >= list.items.length && list.more) list.next();
    else document.getElementById(messageId(chosen))?.scrollIntoView({ block: "center" });
  }, [chosen, list.ready, list.items.length, list.more]);

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
          turn={message.turn === null ? undefined : talk.turns[message.turn]}
          giver={giver}
          chosen={index === chosen}
          more={(offset, limit) => calls.get(`${path}/${index}`, { namespace, conversation, offset, limit })}
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
