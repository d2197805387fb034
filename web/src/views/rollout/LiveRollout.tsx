/** A rollout that has not ended, as far as it has come. Its worker sends turns only while somebody watches. */

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { Live } from "../../api/types";
import { Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Badge, stateName, toneOf } from "../../parts/status";
import { useResource } from "../../state/resource";
import { useNow, useServices } from "../../state/services";
import { argumentsText } from "../../text/arguments";
import { count, counted, duration } from "../../text/format";
import { shortened, visible, visibleLine } from "../../text/visible";
import { roleClass } from "../group/SampleColumn";

/** Milliseconds between two readings; a worker sends at most once a second. */
const INTERVAL = 1_500;

export interface LiveRolloutProps {
  namespace: string;
  name: string;
  id: string;
  onEnded: () => void;
}

export function LiveRollout({ namespace, name, id, onEnded }: LiveRolloutProps): JSX.Element {
  const { calls, router } = useServices();
  const now = useNow(1);
  const live = useResource<Live>(`live ${id}`, (signal) => calls.get(`${Calls.job(name, "rollouts", id)}/live`, { namespace }, signal));
  const ended = live.problem?.status === 409;
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) live.reload();
    }, INTERVAL);
    return () => clearInterval(timer);
  }, [live.reload]);
  useEffect(() => {
    if (ended) onEnded();
  }, [ended]);

  const data = live.data;
  if (live.problem && !data && !ended) return <Failure problem={live.problem} retry={live.reload} />;
  if (!data) return <Waiting slow={live.slow} what="the rollout" />;
  return (
    <div class="rollout">
      <section class="panel head" aria-labelledby="live-title">
        <div class="panel-head">
          <h1 id="live-title">Rollout {visibleLine(id)}</h1>
          <Badge status={`${data.stage ?? ""} ${stateName(data.status)}`} tone={toneOf(data.status)} />
          <span class="grow" />
          <Link href={router.href({ view: "job", namespace, name })}>Back to the job</Link>
        </div>
        <p class="figures">
          {data.since === null ? "" : `For ${duration(Math.max(0, now - data.since))} in this state`}
          {data.worker ? `, at worker ${visibleLine(data.worker)}` : ""}
        </p>
      </section>
      {data.turns.length === 0 ? (
        <p class="notice">Its turns appear here as its worker sends them. A rollout that waits in a queue has none.</p>
      ) : null}
      {data.dropped ? <p class="muted">{count(data.dropped)} earlier turns were dropped; the whole record comes when it has ended.</p> : null}
      <div class="conversation" aria-live="polite" aria-relevant="additions">
        {data.turns.map((turn) => (
          <article key={turn.no} class={`message role-${roleClass(turn.role)}`}>
            <header>
              <span class="role">{visibleLine(shortened(turn.role, 40))}</span>
              <span class="muted">
                {turn.tokens ? `${counted(turn.tokens, "token")}, model ${duration(turn.seconds)}` : ""}
                {turn.running ? ", being sampled" : ""}
              </span>
            </header>
            <div class="text">{visible(turn.text)}</div>
            {turn.tool_calls.map((call, index) => (
              <div key={index} class="call">
                <b class="mono">{visibleLine(shortened(call.name, 120))}</b>
                {call.arguments ? <div class="text mono">{visible(argumentsText(call.arguments))}</div> : null}
              </div>
            ))}
          </article>
        ))}
      </div>
    </div>
  );
}
