/** When each rollout was in which stage. Stragglers are marked, and listed as text. */

import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { GanttRow, Page } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Choice } from "../../parts/fields";
import { Link } from "../../parts/Link";
import { usePages } from "../../state/pages";
import { wordOf } from "../../state/place";
import { useCoalesced, useReopened } from "../../state/resource";
import { useLive, useLocation, useServices } from "../../state/services";
import { duration } from "../../text/format";
import { visibleLine } from "../../text/visible";
import { GanttCanvas } from "./GanttCanvas";
import { aligned, median, spanOf, stragglers, workOf } from "./ganttRows";

const LIMIT = 500;
const REFRESH = 10_000;
/** Stragglers that are listed as text. */
const MOST_LISTED = 10;

export function GanttTab({ namespace, name }: { namespace: string; name: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const sort = wordOf(query, "sort", ["-duration", "started"]);
  const scale = wordOf(query, "scale", ["clock", "own"]);
  const key = JSON.stringify([namespace, name, sort]);
  const gantt = usePages<GanttRow>(key, (cursor, signal) =>
    calls.get<Page<GanttRow>>(`${Calls.job(name)}/gantt`, { namespace, sort, limit: LIMIT, continue: cursor }, signal),
  );
  const scrolled = useRef<HTMLDivElement | null>(null);
  const refresh = useCoalesced(() => {
    if ((scrolled.current?.scrollTop ?? 0) < 20) gantt.reload();
  }, REFRESH);
  useReopened(refresh);
  useLive("ended", (ended) => {
    if (ended.name === name && ended.namespace === namespace) refresh();
  }, [key, refresh]);

  const rows = useMemo(() => {
    const kept = gantt.items.filter((row) => row.spans.length > 0);
    return scale === "own" ? aligned(kept) : kept;
  }, [gantt.items, scale]);
  const usual = useMemo(() => median(rows.map(workOf)), [rows]);
  const late = useMemo(() => stragglers(rows, usual), [rows, usual]);

  if (gantt.problem && rows.length === 0) return <Failure problem={gantt.problem} retry={gantt.reload} />;
  if (!gantt.ready) return <Waiting slow={gantt.slow} what="the timeline" />;
  if (rows.length === 0) {
    return (
      <Empty title="No rollout has begun yet.">
        <p>The timeline fills as workers take rollouts. What the job waits for stands above.</p>
      </Empty>
    );
  }
  return (
    <>
      <div class="filters">
        <Choice
          label="Order"
          value={sort}
          choices={[
            ["-duration", "longest first"],
            ["started", "by start"],
          ]}
          onChange={(value) => router.change({ sort: value === "-duration" ? null : value })}
        />
        <Choice
          label="Starts"
          value={scale}
          choices={[
            ["clock", "by the clock"],
            ["own", "all at zero"],
          ]}
          onChange={(value) => router.change({ scale: value === "clock" ? null : value })}
        />
        <ul class="legend" aria-label="Colours of the timeline">
          {["queue", "init", "run", "eval"].map((part) => (
            <li key={part}>
              <span class={`swatch gantt-${part}`} aria-hidden="true" />
              {part === "queue" ? "waits in a queue" : part}
            </li>
          ))}
          <li>▲ straggler: works more than twice as long as the median ({duration(usual)})</li>
        </ul>
      </div>
      {gantt.problem ? <Failure problem={gantt.problem} retry={gantt.reload} /> : null}
      <GanttCanvas
        rows={rows}
        usual={usual}
        holder={scrolled}
        onOpen={(row) => router.go(router.href({ view: "rollout", namespace, name, id: row.id }))}
        onEnd={gantt.next}
        clock={scale === "clock"}
      />
      <details class="stragglers">
        <summary>
          {late.length === 0 ? "No stragglers among these rollouts" : `Stragglers among these ${rows.length} rollouts: ${late.length}`}
        </summary>
        <ol>
          {(late.length ? late : rows).slice(0, MOST_LISTED).map((row) => (
            <li key={row.id}>
              <Link href={router.href({ view: "rollout", namespace, name, id: row.id })}>
                {visibleLine(row.task_id)} #{row.sample}
              </Link>{" "}
              <span class="muted">
                {row.status}, works {duration(workOf(row))} of {duration(spanOf(row))}:{" "}
                {row.spans.map(([stage, start, end]) => `${stage} ${duration(end - start)}`).join(", ")}
              </span>
            </li>
          ))}
        </ol>
      </details>
    </>
  );
}
