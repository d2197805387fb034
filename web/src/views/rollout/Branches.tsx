/** The conversations of a rollout as a list, from which one is chosen. */

import type { JSX } from "preact";
import type { Brief } from "../../api/types";
import { Link } from "../../parts/Link";
import { Badge } from "../../parts/status";
import { useServices } from "../../state/services";
import { counted } from "../../text/format";
import { visibleLine } from "../../text/visible";
import { type Talk, type TalkPlace, leftAt, talkName } from "./talks";

export interface BranchesProps {
  brief: Brief;
  namespace: string;
  name: string;
  talks: readonly Talk[];
  shown: Talk;
}

export function Branches({ brief, namespace, name, talks, shown }: BranchesProps): JSX.Element {
  const { router } = useServices();
  const href = ({ number, message }: TalkPlace) =>
    router.href(
      { view: "rollout", namespace, name, id: brief.id },
      { conversation: number === brief.conversation ? null : number, message: message === null ? null : message },
    );
  return (
    <nav class="panel branches" aria-labelledby="branches-title">
      <h2 id="branches-title">{counted(talks.length, "conversation")}</h2>
      <ul>
        {talks.map((talk) => {
          const left = leftAt(talks, talk);
          const sampled = talk.turns.reduce((sum, turn) => sum + turn.end - turn.start, 0);
          return (
            <li key={talk.number} class={talk.number === shown.number ? "shown" : ""}>
              <Link href={href({ number: talk.number, message: null })} current={talk.number === shown.number}>
                {visibleLine(talkName(talk))}
              </Link>
              <Badge status={talk.trained ? "trained on" : "not trained on"} tone={talk.trained ? "good" : "gone"} />
              <span class="muted">
                {counted(talk.messages, "message")}, {counted(talk.turnsTotal, "turn")}, {counted(sampled, "token")}
              </span>
              {left ? (
                <span class="muted">
                  {talk.own || talk.kind === "main" ? "rewrites " : left.message === null ? "began in " : "left "}
                  <Link href={href(left)}>
                    conversation {left.number}
                    {left.message === null ? "" : ` after message ${left.message + 1}`}
                  </Link>
                </span>
              ) : null}
            </li>
          );
        })}
      </ul>
    </nav>
  );
}
