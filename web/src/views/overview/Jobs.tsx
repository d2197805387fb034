/** The list of jobs: those that are late come first. */

import type { ComponentChildren, JSX } from "preact";
import type { JobRow, Page } from "../../api/types";
import { STAGES } from "../../api/types";
import { Command, Empty, Failure, Waiting } from "../../parts/feedback";
import { Choice, Search } from "../../parts/fields";
import { Link } from "../../parts/Link";
import { Badge, type Part, StateBar } from "../../parts/status";
import { usePages } from "../../state/pages";
import { wordOf } from "../../state/place";
import { useCoalesced, useReopened } from "../../state/resource";
import { useLive, useLocation, useServices } from "../../state/services";
import { ago, count, duration, moment, reward } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";

const STATES = ["", "active", "finished", "late"] as const;
const SORTS = ["late", "-created", "created", "name"] as const;

const LIMIT = 50;
/** Milliseconds between two readings of the first page while new jobs come. */
const REFRESH = 2_000;

export function Jobs({ now }: { now: number }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const state = wordOf(query, "state", STATES);
  const sort = wordOf(query, "sort", SORTS);
  const search = query.get("search") ?? "";
  const namespace = query.get("namespace") ?? "";
  const key = JSON.stringify([state, sort, search, namespace]);
  const jobs = usePages<JobRow>(key, (cursor, signal) =>
    calls.get<Page<JobRow>>("/jobs", { state, sort, search, namespace, limit: LIMIT, continue: cursor }, signal),
  );
  const refresh = useCoalesced(jobs.reload, REFRESH);
  const filtered = state !== "" || search !== "" || namespace !== "";

  useReopened(jobs.reload);
  useLive("job", (row) => {
    const known = jobs.items.some((job) => job.uid === row.uid);
    if (known) jobs.patch((items) => items.map((job) => (job.uid === row.uid ? row : job)));
    // A new job belongs on the first page; its place there is the server's to say.
    else if (!filtered && jobs.items.length <= LIMIT) refresh();
  }, [key, jobs.items, refresh]);
  useLive("gone", (gone) => jobs.patch((items) => items.filter((job) => job.namespace !== gone.namespace || job.name !== gone.name)), [key]);

  return (
    <section class="panel" aria-labelledby="jobs-title">
      <div class="panel-head">
        <h2 id="jobs-title">Jobs</h2>
        <div class="filters" role="search" aria-label="Filter jobs">
          <Search value={search} label="Search by name" onChange={(text) => router.change({ search: text }, true)} />
          <Choice
            label="Show"
            value={state}
            choices={[
              ["", "all jobs"],
              ["active", "unfinished"],
              ["late", "late"],
              ["finished", "finished"],
            ]}
            onChange={(value) => router.change({ state: value })}
          />
          <Choice
            label="Order"
            value={sort}
            choices={[
              ["late", "late first"],
              ["-created", "newest first"],
              ["created", "oldest first"],
              ["name", "by name"],
            ]}
            onChange={(value) => router.change({ sort: value === "late" ? null : value })}
          />
        </div>
      </div>
      {jobs.problem ? <Failure problem={jobs.problem} retry={jobs.reload} /> : null}
      {!jobs.ready ? <Waiting slow={jobs.slow} what="jobs" /> : null}
      {jobs.ready && jobs.items.length === 0 && !jobs.problem ? <NoJobs filtered={filtered} /> : null}
      {jobs.items.length > 0 ? <JobTable jobs={jobs.items} now={now} /> : null}
      {jobs.more ? (
        <button type="button" onClick={jobs.next} disabled={jobs.slow}>
          Show more jobs
        </button>
      ) : null}
    </section>
  );
}

function NoJobs({ filtered }: { filtered: boolean }): JSX.Element {
  const { router } = useServices();
  if (filtered) {
    return (
      <Empty title="No job matches these filters.">
        <button type="button" onClick={() => router.change({ state: null, search: null, namespace: null })}>
          Remove the filters
        </button>
      </Empty>
    );
  }
  return (
    <Empty title="There are no jobs yet.">
      <p>Submit one, and it appears here at once:</p>
      <Command>rollyard submit -f job.yaml</Command>
    </Empty>
  );
}

function JobTable({ jobs, now }: { jobs: JobRow[]; now: number }): JSX.Element {
  return (
    <div class="scroll-x" tabIndex={0} role="group" aria-label="Table of jobs">
      <table class="rows">
        <thead>
          <tr>
            <th scope="col">Job</th>
            <th scope="col">Phase</th>
            <th scope="col" class="wide">
              Rollouts
            </th>
            <th scope="col" class="number">
              Ended
            </th>
            <th scope="col" class="number">
              Failed
            </th>
            <th scope="col" class="number">
              Reward
            </th>
            <th scope="col">Waits for</th>
            <th scope="col">Pool</th>
            <th scope="col">Age</th>
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <JobLine key={job.uid} job={job} now={now} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function JobLine({ job, now }: { job: JobRow; now: number }): JSX.Element {
  const { router } = useServices();
  const ended = job.succeeded + job.failed + job.cancelled;
  return (
    <tr>
      <th scope="row">
        <Link href={router.href({ view: "job", namespace: job.namespace, name: job.name })}>
          {job.namespace === "default" ? "" : <span class="muted">{visibleLine(job.namespace)}/</span>}
          {visibleLine(job.name)}
        </Link>
      </th>
      <td>
        <Badge status={job.suspended && job.finished_at === null ? "Suspended" : job.phase} /> <Late job={job} />
      </td>
      <td>
        <StateBar parts={partsOf(job)} label={`Rollouts of ${job.name}`} />
      </td>
      <td class="number">
        {count(ended)} <span class="muted">of {count(job.total)}</span>
      </td>
      <td class={job.failed ? "number bad-text" : "number"}>{count(job.failed)}</td>
      <td class="number">{reward(job.reward_mean)}</td>
      <td class="clip" title={job.waits_for ? visible(job.waits_for.message) : ""}>
        <WaitsFor job={job} />
      </td>
      <td>{visibleLine(job.pool ?? "–")}</td>
      <td title={moment(job.created_at)}>{ago(job.created_at, now)}</td>
    </tr>
  );
}

/** A mark for a job that is late, with by how much. */
export function Late({ job }: { job: JobRow }): JSX.Element | null {
  if (job.late === null || job.late <= 0 || job.finished_at !== null) return null;
  return (
    <span class="badge tone-warn" title="Past its deadline, projected past it, or without progress">
      <span aria-hidden="true">!</span> late {duration(job.late)}
    </span>
  );
}

export function WaitsFor({ job }: { job: JobRow }): ComponentChildren {
  if (!job.waits_for) return <span class="muted">–</span>;
  return (
    <>
      <b>{visibleLine(job.waits_for.reason)}</b> <span class="muted">{visibleLine(job.waits_for.message)}</span>
    </>
  );
}

/** The parts of a job's bar: what has ended, then each stage, then what waits. */
export function partsOf(job: JobRow): Part[] {
  const sum = (what: "active" | "queued") => STAGES.reduce((n, stage) => n + (job.stages[stage]?.[what] ?? 0), 0);
  const ended = job.succeeded + job.failed + job.cancelled;
  const active = sum("active");
  return [
    { name: "succeeded", n: job.succeeded, tone: "good" },
    { name: "failed", n: job.failed, tone: "bad" },
    { name: "cancelled", n: job.cancelled, tone: "gone" },
    { name: "at work", n: active, tone: "active" },
    { name: "waiting", n: Math.max(0, job.total - ended - active), tone: "queued" },
  ];
}
