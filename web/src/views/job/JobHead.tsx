/** A job's name, phase, times and conditions, and the button that cancels it. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { type CallError, Calls } from "../../api/calls";
import type { JobRow, RolloutJob, SkippedRows } from "../../api/types";
import { STAGES } from "../../api/types";
import { Dialog } from "../../parts/dialogs";
import { Failure } from "../../parts/feedback";
import { Badge, Legend, StateBar } from "../../parts/status";
import { asCallError } from "../../state/resource";
import { useServices } from "../../state/services";
import { ago, count, duration, moment } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";
import { Late, WaitsFor, partsOf } from "../overview/Jobs";

export function JobHead({ job, row, now }: { job: RolloutJob; row: JobRow | null; now: number }): JSX.Element {
  const { session } = useServices();
  const { namespace, name } = job.metadata;
  const finished = row ? row.finished_at !== null : Boolean(job.status.completionTime);
  const failing = (job.status.conditions ?? []).filter((condition) => condition.message && condition.status !== "Unknown");
  return (
    <section class="panel head" aria-labelledby="job-title">
      <div class="panel-head">
        <h1 id="job-title">{visibleLine(name)}</h1>
        <Badge status={job.spec.suspend && !finished ? "Suspended" : job.status.phase} />
        {row ? <Late job={row} /> : null}
        <span class="grow" />
        {session?.cancel && !finished ? <Cancel namespace={namespace} name={name} /> : null}
      </div>
      <dl class="facts">
        <Fact name="Handler" value={job.spec.handler ?? "–"} />
        <Fact name="Samples a task" value={count(job.spec.samplesPerTask ?? 1)} />
        <Fact name="Pool" value={row?.pool ?? job.spec.backendRef?.name ?? "–"} />
        {row ? (
          <>
            <Fact name="Created" value={ago(row.created_at, now)} title={moment(row.created_at)} />
            <Fact
              name={row.finished_at === null ? "Runs for" : "Took"}
              value={row.started_at === null ? "–" : duration((row.finished_at ?? now) - row.started_at)}
              title={moment(row.started_at)}
            />
            {row.deadline_at !== null ? (
              <Fact
                name="Deadline"
                value={row.deadline_at < now ? `${ago(row.deadline_at, now)}` : `in ${duration(row.deadline_at - now)}`}
                title={moment(row.deadline_at)}
              />
            ) : null}
          </>
        ) : null}
      </dl>
      {row ? (
        <>
          <StateBar parts={partsOf(row)} label="All rollouts" />
          <div class="stage-progress">
            <Legend parts={partsOf(row)} />
            <ul class="legend" aria-label="Queues by stage">
              {STAGES.map((stage) => (
                <li key={stage}>
                  {stage}: <b>{count(row.stages[stage]?.queued ?? 0)}</b> waiting, <b>{count(row.stages[stage]?.active ?? 0)}</b> at work
                </li>
              ))}
            </ul>
          </div>
          {row.waits_for ? (
            <p class="notice">
              Waits for <WaitsFor job={row} />
            </p>
          ) : null}
        </>
      ) : null}
      {job.status.message && job.status.message !== row?.waits_for?.message ? (
        <p class="notice">{visible(job.status.message)}</p>
      ) : null}
      {job.status.advice?.length ? (
        <ul class="advice" aria-label="Advice">
          {job.status.advice.map((advice) => (
            <li key={advice.reason} class="notice">
              {visibleLine(advice.message)}
            </li>
          ))}
        </ul>
      ) : null}
      {job.status.skippedRows ? <Skipped rows={job.status.skippedRows} /> : null}
      {failing.length > 0 ? (
        <details class="conditions">
          <summary>Conditions</summary>
          <table class="plain">
            <tbody>
              {failing.map((condition) => (
                <tr key={condition.type}>
                  <th scope="row">{visibleLine(condition.type)}</th>
                  <td>{visibleLine(condition.status)}</td>
                  <td>{visibleLine(condition.reason ?? "")}</td>
                  <td>{visible(condition.message ?? "")}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </details>
      ) : null}
    </section>
  );
}

function Skipped({ rows }: { rows: SkippedRows }): JSX.Element {
  const more = rows.count - rows.reasons.length;
  return (
    <details class="conditions">
      <summary>
        {count(rows.count)} of {count(rows.read)} rows of the task list are skipped
      </summary>
      <ul class="reasons">
        {rows.reasons.map((reason) => (
          <li key={reason}>{visibleLine(reason)}</li>
        ))}
        {more > 0 ? <li class="muted">… {count(more)} more</li> : null}
      </ul>
    </details>
  );
}

export function Fact({ name, value, title }: { name: string; value: string; title?: string }): JSX.Element {
  return (
    <div title={title ? visible(title) : undefined}>
      <dt>{name}</dt>
      <dd>{visibleLine(value)}</dd>
    </div>
  );
}

function Cancel({ namespace, name }: { namespace: string; name: string }): JSX.Element {
  const { calls } = useServices();
  const [asked, setAsked] = useState(false);
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<CallError | null>(null);
  const cancel = async () => {
    setBusy(true);
    setProblem(null);
    try {
      await calls.post(`${Calls.job(name)}/cancel`, { namespace });
      setAsked(false);
    } catch (error) {
      setProblem(asCallError(error));
    } finally {
      setBusy(false);
    }
  };
  return (
    <>
      <button type="button" class="danger" onClick={() => setAsked(true)}>
        Cancel job…
      </button>
      {asked ? (
        <Dialog title="Cancel this job?" onClose={() => setAsked(false)}>
          <p>
            Rollouts of <b>{visibleLine(name)}</b> that have not ended stop and count as cancelled. Those that have ended stay. This cannot be
            undone.
          </p>
          {problem ? <Failure problem={problem} /> : null}
          <form method="dialog" class="buttons">
            <button autofocus>Keep it</button>
            <button type="button" class="danger" disabled={busy} onClick={() => void cancel()}>
              Cancel the job
            </button>
          </form>
        </Dialog>
      ) : null}
    </>
  );
}
