/** One message. Its text is only ever a text node, whatever it holds. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import type { CallError } from "../../api/calls";
import type { Message, MessageText, Turn } from "../../api/types";
import { Failure } from "../../parts/feedback";
import { asCallError } from "../../state/resource";
import { argumentsText } from "../../text/arguments";
import { count, counted, duration } from "../../text/format";
import { folded, shortened, visible, visibleLine } from "../../text/visible";
import { roleClass } from "../group/SampleColumn";

/** Characters and lines that are shown before the reader asks for more, of those that have come. */
const FOLDED = 4_000;
const FOLDED_LINES = 40;
/** Characters of each further call. */
const MORE = 200_000;
/** Characters that one message may put into the page; the download has all of them. */
const MOST = 4_000_000;

export interface MessageCardProps {
  no: number;
  message: Message;
  turn: Turn | undefined;
  /** Who has given a message of the assistant that no turn has sampled. */
  giver: string;
  /** Whether it is the message to which the address leads. */
  chosen: boolean;
  more: (offset: number, limit: number) => Promise<MessageText>;
}

/** The id of a message's element. */
export function messageId(no: number): string {
  return `message-${no}`;
}

export function MessageCard({ no, message, turn, giver, chosen, more }: MessageCardProps): JSX.Element {
  const role = visibleLine(shortened(message.role, 40));
  return (
    <article id={messageId(no)} class={`message role-${roleClass(message.role)}${chosen ? " chosen" : ""}`} aria-label={`Message ${no + 1}, ${role}`}>
      <header>
        <span class="role">{role}</span>
        {message.turn === null ? null : <span class="muted">turn {message.turn + 1}</span>}
        {message.turn === null && message.role === "assistant" ? <span class="muted">given by the {giver}</span> : null}
        {turn ? (
          <span class="muted">
            {counted(turn.end - turn.start, "token")}, model {duration(turn.model_seconds)}
            {turn.tool_seconds ? `, tools ${duration(turn.tool_seconds)}` : ""}
            {turn.finish_reason === "stop" || turn.finish_reason === "tool_calls" ? "" : `, ended by ${visibleLine(turn.finish_reason)}`}
          </span>
        ) : null}
        {message.tool_call_id ? <span class="muted mono">{visibleLine(shortened(message.tool_call_id, 60))}</span> : null}
        <span class="grow" />
        {message.characters > FOLDED ? <span class="muted">{count(message.characters)} characters</span> : null}
      </header>
      {message.reasoning_content ? (
        <div class="muted">
          <LongText first={message.reasoning_content} characters={0} mono={false} />
        </div>
      ) : null}
      {message.content ? <LongText first={message.content} characters={message.characters} more={more} mono={message.role === "tool"} /> : null}
      {(message.tool_calls ?? []).map((call, index) => {
        const outcome = turn?.tool_calls[index];
        return (
          <div key={index} class="call">
            <div class="call-name">
              <span aria-hidden="true">⚙</span> <b class="mono">{visibleLine(shortened(call.name, 120))}</b>
              {outcome?.seconds ? <span class="muted"> {duration(outcome.seconds)}</span> : null}
              {outcome?.error ? <span class="bad-text"> ✕ {visibleLine(shortened(outcome.error, 300))}</span> : null}
            </div>
            <LongText first={argumentsText(call.arguments)} characters={0} mono={true} />
          </div>
        );
      })}
    </article>
  );
}

interface LongTextProps {
  first: string;
  characters: number;
  more?: (offset: number, limit: number) => Promise<MessageText>;
  mono: boolean;
}

/** A text that unfolds: first what has come with the message, then further parts of it by calls. */
function LongText({ first, characters, more, mono }: LongTextProps): JSX.Element {
  const [parts, setParts] = useState([first]);
  const short = folded(first, FOLDED_LINES, FOLDED);
  const [open, setOpen] = useState(short === first);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<CallError | null>(null);
  // The server counts characters, and JavaScript UTF-16 units.
  const have = parts.reduce((sum, part) => sum + lengthOf(part), 0);
  const rest = more ? Math.max(0, characters - have) : 0;
  const unfold = async () => {
    if (!open || !more || rest === 0) {
      setOpen(true);
      return;
    }
    setBusy(true);
    setProblem(null);
    try {
      const answer = await more(have, MORE);
      if (answer.text !== "") setParts([...parts, answer.text]);
    } catch (error) {
      setProblem(asCallError(error));
    } finally {
      setBusy(false);
    }
  };
  const full = have >= MOST;
  return (
    <>
      <div class={mono ? "text mono" : "text"}>
        {open ? parts.map((part, index) => <span key={index}>{visible(part)}</span>) : visible(short)}
      </div>
      {problem ? <Failure problem={problem} /> : null}
      {open && full ? <p class="muted">The rest is in the download of the raw record.</p> : null}
      {(!open || rest > 0) && !full ? (
        <button type="button" class="quiet" disabled={busy} onClick={() => void unfold()}>
          Show more ({count(open ? rest : Math.max(characters, first.length) - short.length)} characters)
        </button>
      ) : null}
    </>
  );
}

function lengthOf(text: string): number {
  let pairs = 0;
  for (let i = 0; i < text.length; i += 1) {
    // A surrogate that stands alone is a character of its own.
    if ((text.codePointAt(i) ?? 0) > 0xffff) {
      pairs += 1;
      i += 1;
    }
  }
  return text.length - pairs;
}
