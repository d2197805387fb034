/** Nodes, the workers on them, and what each worker holds. A node and a worker are opened by the address. */

import type { JSX } from "preact";
import type { FleetNode, Page, RolloutRow, Worker } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Badge } from "../../parts/status";
import { useResource } from "../../state/resource";
import { useLocation, useServices } from "../../state/services";
import { ago, count, counted, duration } from "../../text/format";
import { shortened, visible, visibleLine } from "../../text/visible";

/** Seconds of silence after which a worker or node is shown as silent. */
const SILENT = 30;
/** Workers that are listed at once; a search finds the others. */
const MOST_WORKERS = 100;

export interface FleetProps {
  nodes: FleetNode[];
  workers: Worker[];
  more: number;
  now: number;
}

export function Fleet({ nodes, workers, more, now }: FleetProps): JSX.Element {
  const { router } = useServices();
  const { query } = useLocation();
  // A single node is always open.
  const node = nodes.length === 1 ? (nodes[0]?.name ?? null) : query.get("node");
  const known = nodes.length > 0;
  const shown = node === null ? (known ? [] : workers) : workers.filter((worker) => worker.node === node);
  return (
    <section class="panel" aria-labelledby="fleet-title">
      <h2 id="fleet-title">Workers and nodes</h2>
      {workers.length === 0 && !known ? (
        <Empty title="No worker has been heard.">
          <p>
            Workers start with their job. On one machine <code>rollyard up</code> starts them.
          </p>
        </Empty>
      ) : null}
      {known ? (
        <ul class="nodes" aria-label="Nodes">
          {nodes.map((item) => {
            const errors = workers.filter((worker) => worker.node === item.name && worker.last_error !== null).length;
            const silent = item.heard_at !== null && now - item.heard_at > SILENT;
            return (
              <li key={item.name}>
                <button
                  type="button"
                  class="node"
                  aria-expanded={item.name === node}
                  onClick={() => router.change({ node: item.name === node ? null : item.name, worker: null })}
                >
                  <b>{visibleLine(shortened(item.name, 60))}</b>
                  <span>
                    {counted(item.workers, "worker")}, {counted(item.active, "rollout")}
                  </span>
                  <span class={silent ? "warn-text" : "muted"}>
                    {silent ? "! silent, " : ""}heard {ago(item.heard_at, now)}
                  </span>
                  {errors ? <span class="bad-text">✕ last errors of {counted(errors, "worker")}</span> : null}
                </button>
              </li>
            );
          })}
        </ul>
      ) : null}
      {shown.length > 0 ? <Workers workers={shown.slice(0, MOST_WORKERS)} now={now} /> : null}
      {shown.length > MOST_WORKERS || more ? (
        <p class="muted">{count(Math.max(0, shown.length - MOST_WORKERS) + more)} further ones are not listed.</p>
      ) : null}
    </section>
  );
}

function Workers({ workers, now }: { workers: Worker[]; now: number }): JSX.Element {
  const { router } = useServices();
  const { query } = useLocation();
  const open = query.get("worker");
  return (
    <div class="scroll-x" tabIndex={0} role="group" aria-label="Table of workers">
      <table class="rows">
        <thead>
          <tr>
            <th scope="col">Worker</th>
            <th scope="col">Job</th>
            <th scope="col">Stages</th>
            <th scope="col" class="number">
              Rollouts
            </th>
            <th scope="col">Heard</th>
            <th scope="col">Last error</th>
          </tr>
        </thead>
        <tbody>
          {workers.map((worker) => (
            <WorkerLines
              key={`${worker.namespace}/${worker.name}`}
              worker={worker}
              now={now}
              open={worker.name === open}
              onToggle={() => router.change({ worker: worker.name === open ? null : worker.name })}
            />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function WorkerLines({ worker, now, open, onToggle }: { worker: Worker; now: number; open: boolean; onToggle: () => void }): JSX.Element {
  const { router } = useServices();
  const error = worker.last_error;
  const own = worker.job === null || worker.namespace === null ? null : { namespace: worker.namespace, name: worker.job };
  const silent = worker.heard_at !== null && now - worker.heard_at > SILENT;
  return (
    <>
      <tr>
        <th scope="row" class="clip">
          <button type="button" class="disclosure" aria-expanded={open} onClick={onToggle} title={visible(worker.name)}>
            {visibleLine(worker.name)}
          </button>
        </th>
        <td>
          {own === null ? <span class="muted">any</span> : <Link href={router.href({ view: "job", ...own })}>{visibleLine(own.name)}</Link>}
        </td>
        <td>{worker.stages.map(visibleLine).join(", ")}</td>
        <td class="number">{count(worker.active)}</td>
        <td>{silent ? <Badge status={`silent ${ago(worker.heard_at, now)}`} tone="warn" /> : ago(worker.heard_at, now)}</td>
        <td class="clip" title={error ? visible(error.message) : ""}>
          {error ? (
            <>
              {own === null ? (
                visibleLine(error.reason)
              ) : (
                <Link href={router.href({ view: "rollout", ...own, id: error.rollout })}>{visibleLine(error.reason)}</Link>
              )}{" "}
              <span class="muted">
                {ago(error.time, now)} {visibleLine(shortened(error.message, 200))}
              </span>
            </>
          ) : (
            <span class="muted">none</span>
          )}
        </td>
      </tr>
      {open ? (
        <tr>
          <td colSpan={6}>
            <Held worker={worker} now={now} />
          </td>
        </tr>
      ) : null}
    </>
  );
}

function Held({ worker, now }: { worker: Worker; now: number }): JSX.Element {
  const { calls, router } = useServices();
  const held = useResource<Page<RolloutRow>>(`${worker.namespace}/${worker.name} ${worker.active}`, (signal) =>
    calls.get(`/workers/${encodeURIComponent(worker.name)}/rollouts`, { namespace: worker.namespace }, signal),
  );
  if (held.problem) return <Failure problem={held.problem} retry={held.reload} />;
  if (!held.data) return <Waiting slow={held.slow} what="rollouts" />;
  if (held.data.items.length === 0) return <span class="muted">It holds no rollout at the moment.</span>;
  return (
    <ul class="held">
      {held.data.items.map((row) => (
        <li key={row.id}>
          <Link
            href={router.href({
              view: "rollout",
              namespace: row.namespace ?? worker.namespace ?? "default",
              name: row.job ?? worker.job ?? "",
              id: row.id,
            })}
          >
            {visibleLine(row.task_id)} #{row.sample}
          </Link>{" "}
          <span class="muted">
            {visibleLine(row.stage ?? "")} for {row.since === null ? "–" : duration(now - row.since)}
          </span>
        </li>
      ))}
    </ul>
  );
}
