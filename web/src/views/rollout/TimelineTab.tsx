/** When a rollout was in which stage, how its turns took their time, and which attempts did not end well. */

import type { JSX } from "preact";
import type { Attempt, Brief, Span, Turn } from "../../api/types";
import { STAGES } from "../../api/types";
import { count, duration, moment } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";
import { talkName, talksOf } from "./talks";

export function TimelineTab({ brief }: { brief: Brief }): JSX.Element {
  const talks = talksOf(brief);
  return (
    <div class="timeline">
      <section class="panel" aria-labelledby="spans-title">
        <h2 id="spans-title">Stages</h2>
        {brief.spans.length ? <Spans spans={brief.spans} /> : <p class="muted">Its stages' times were not kept.</p>}
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">Stage</th>
              <th scope="col" class="number">
                In the queue
              </th>
              <th scope="col" class="number">
                At work
              </th>
              <th scope="col" class="number">
                Tries
              </th>
            </tr>
          </thead>
          <tbody>
            {STAGES.map((stage) => (
              <tr key={stage}>
                <th scope="row">{stage}</th>
                <td class="number">{duration(brief.timings[stage].queued_seconds)}</td>
                <td class="number">{duration(brief.timings[stage].active_seconds)}</td>
                <td class="number">{count(brief.timings[stage].attempts)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
      <section class="panel" aria-labelledby="attempts-title">
        <h2 id="attempts-title">Attempts that did not end well</h2>
        {brief.attempts.length === 0 ? <p class="muted">There are none: each stage succeeded at its first try.</p> : <Attempts brief={brief} />}
      </section>
      {talks
        .filter((talk) => talk.turns.length > 0)
        .map((talk) => (
          <section key={talk.number} class="panel" aria-labelledby={`turns-title-${talk.number}`}>
            <h2 id={`turns-title-${talk.number}`}>{talks.length > 1 ? `Turns of conversation ${visibleLine(talkName(talk))}` : "Turns"}</h2>
            <Turns turns={talk.turns} total={talk.turnsTotal} />
          </section>
        ))}
    </div>
  );
}

function Spans({ spans }: { spans: Span[] }): JSX.Element {
  const start = spans[0]?.[1] ?? 0;
  const whole = Math.max(1e-6, (spans.at(-1)?.[2] ?? start) - start);
  return (
    <>
      <ol class="spans" aria-label="Stages in time">
        {spans.map(([name, from, to], index) => (
          <li key={index}>
            <span class="span-name">{name.replace("-queue", " queue")}</span>
            <span class="span-track" aria-hidden="true">
              <span
                class={`span-bar gantt-${name.endsWith("-queue") ? "queue" : name}`}
                style={{ left: `${(100 * (from - start)) / whole}%`, width: `max(2px, ${(100 * (to - from)) / whole}%)` }}
              />
            </span>
            <span class="number">{duration(to - from)}</span>
          </li>
        ))}
      </ol>
      <p class="muted">
        {moment(start)} to {moment(start + whole)}, {duration(whole)} in all
      </p>
    </>
  );
}

function Attempts({ brief }: { brief: Brief }): JSX.Element {
  return (
    <div class="scroll-x" tabIndex={0} role="group" aria-label="Table of attempts">
      <table class="rows">
        <thead>
          <tr>
            <th scope="col">Stage</th>
            <th scope="col">Reason</th>
            <th scope="col">Message</th>
            <th scope="col">Worker</th>
            <th scope="col">Began</th>
            <th scope="col" class="number">
              Took
            </th>
            <th scope="col">Counted</th>
          </tr>
        </thead>
        <tbody>
          {brief.attempts.map((attempt: Attempt, index) => (
            <tr key={index}>
              <th scope="row">
                {attempt.stage} {attempt.attempt ? count(attempt.attempt) : ""}
              </th>
              <td>{visibleLine(attempt.reason)}</td>
              <td class="wrap">{visible(attempt.message)}</td>
              <td class="clip" title={visible(`${attempt.worker} ${attempt.node}`)}>
                {visibleLine(attempt.worker || "–")} <span class="muted">{visibleLine(attempt.node)}</span>
              </td>
              <td>{moment(attempt.started)}</td>
              <td class="number">{duration(attempt.seconds)}</td>
              <td>{attempt.counted ? "yes" : "no"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {brief.attempts_dropped ? <p class="muted">{count(brief.attempts_dropped)} further attempts were not kept.</p> : null}
    </div>
  );
}

/** Turns of a conversation that are listed; the record has the others. */
const MOST_TURNS = 300;

function Turns({ turns, total }: { turns: Turn[]; total: number }): JSX.Element {
  const shown = turns.slice(0, MOST_TURNS);
  const most = Math.max(1e-9, ...turns.map((turn) => turn.model_seconds + turn.tool_seconds));
  return (
    <>
      <table class="plain times">
        <thead>
          <tr>
            <th scope="col">Turn</th>
            <th scope="col">Model, then tools</th>
            <th scope="col" class="number">
              Model
            </th>
            <th scope="col" class="number">
              Tools
            </th>
            <th scope="col" class="number">
              Tokens
            </th>
            <th scope="col">Calls</th>
          </tr>
        </thead>
        <tbody>
          {shown.map((turn, index) => (
            <tr key={index}>
              <th scope="row">{count(index + 1)}</th>
              <td>
                <span class="timebar" aria-hidden="true">
                  <span class="fill-model" style={{ width: `${(100 * turn.model_seconds) / most}%` }} />
                  <span class="fill-tools" style={{ width: `${(100 * turn.tool_seconds) / most}%` }} />
                </span>
              </td>
              <td class="number">{duration(turn.model_seconds)}</td>
              <td class="number">{duration(turn.tool_seconds)}</td>
              <td class="number">{count(turn.end - turn.start)}</td>
              <td class="mono">{turn.tool_calls.map((call) => visibleLine(call.name)).join(", ") || "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {total > shown.length ? <p class="muted">{count(total - shown.length)} further turns are in the raw record.</p> : null}
    </>
  );
}
