/** A job's groups as a grid: one row a group, one cell a sample. */

import type { JSX } from "preact";
import { useCallback, useMemo, useRef } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { GridPage, GridRow, GridSample, Page, Statistics } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Choice, Search } from "../../parts/fields";
import { usePages } from "../../state/pages";
import { wordOf } from "../../state/place";
import { useCoalesced, useReopened } from "../../state/resource";
import { useLive, useLocation, useServices } from "../../state/services";
import { count } from "../../text/format";
import { WindowedList } from "../../window/WindowedList";
import { GROUP_ROW_HEIGHT, GroupRow } from "./GroupRow";
import { withEnded } from "./gridRows";
import { moveInGrid } from "./gridKeys";

const SORTS = ["no", "-reward", "reward", "variance", "reason", "ended"] as const;
/** A group is shown if a sample of it has the status. */
const STATUSES = ["", "queued", "leased", "succeeded", "failed", "cancelled"] as const;
/** Rows of a call; the most that the control plane gives. */
const LIMIT = 500;
/** Milliseconds between two readings of the rows that can be seen, while rollouts begin and end. */
const REFRESH = 15_000;

export interface GroupsTabProps {
  namespace: string;
  name: string;
  rewards: Statistics["rewards"] | null;
}

export function GroupsTab({ namespace, name, rewards }: GroupsTabProps): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const sort = wordOf(query, "sort", SORTS);
  const status = wordOf(query, "status", STATUSES);
  const informative = wordOf(query, "informative", ["", "true", "false"]);
  const search = query.get("search") ?? "";
  const key = JSON.stringify([namespace, name, sort, status, informative, search]);
  const groups = usePages<GridRow>(key, async (cursor, signal) => {
    const params = { namespace, sort, status, informative, search, limit: LIMIT, continue: cursor };
    return withWholeIds(await calls.get<GridPage>(`${Calls.job(name)}/grid`, params, signal));
  });
  const holder = useRef<HTMLDivElement | null>(null);
  const memory = useMemo(() => router.positions(), [router, key]);
  const refresh = useCoalesced(() => {
    const top = holder.current?.scrollTop ?? 0;
    // A reader who has scrolled away keeps the place.
    if (top < GROUP_ROW_HEIGHT && groups.items.length <= LIMIT) groups.reload();
    else if (sort === "no") groups.refreshAt(Math.floor(top / GROUP_ROW_HEIGHT));
  }, REFRESH);

  useReopened(refresh);
  useLive("ended", (ended) => {
    if (ended.name !== name || ended.namespace !== namespace) return;
    groups.patch((rows) => withEnded(rows, ended.rollouts));
    refresh();
  }, [key, refresh]);
  useLive("job", (job) => {
    if (job.name === name && job.namespace === namespace) refresh();
  }, [key, refresh]);

  const range = { least: rewards?.min ?? 0, most: rewards?.max ?? 1 };
  const row = useCallback(
    (index: number) => {
      const group = groups.items[index];
      return group ? <GroupRow key={group.no} group={group} index={index} namespace={namespace} name={name} least={range.least} most={range.most} /> : null;
    },
    [groups.items, namespace, name, range.least, range.most],
  );
  const filtered = status !== "" || informative !== "" || search !== "";
  return (
    <>
      <div class="filters" role="search" aria-label="Filter groups">
        <Search value={search} label="Search by task" onChange={(text) => router.change({ search: text }, true)} />
        <Choice
          label="Order"
          value={sort}
          choices={[
            ["no", "as submitted"],
            ["-reward", "highest mean reward"],
            ["reward", "lowest mean reward"],
            ["variance", "most varied rewards"],
            ["reason", "by reason"],
            ["ended", "by end"],
          ]}
          onChange={(value) => router.change({ sort: value === "no" ? null : value })}
        />
        <Choice
          label="Signal"
          value={informative}
          choices={[
            ["", "any"],
            ["true", "◆ informative"],
            ["false", "not informative"],
          ]}
          onChange={(value) => router.change({ informative: value })}
        />
        <Choice
          label="With samples"
          value={status}
          choices={[
            ["", "of any state"],
            ["queued", "waiting"],
            ["leased", "at work"],
            ["succeeded", "succeeded"],
            ["failed", "failed"],
            ["cancelled", "cancelled"],
          ]}
          onChange={(value) => router.change({ status: value })}
        />
        <span class="muted" role="status">
          {groups.ready ? `${count(groups.items.length)}${groups.more ? "+" : ""} groups` : ""}
        </span>
      </div>
      <ul class="legend" aria-label="Marks of the grid">
        <li>
          <span class="cell shade-0">0</span> to <span class="cell shade-10">1</span> reward
        </li>
        <li>
          <span class="cell cell-q">·</span> waiting
        </li>
        <li>
          <span class="cell cell-l">▸</span> at work
        </li>
        <li>
          <span class="cell cell-f">✕</span> failed
        </li>
        <li>
          <span class="cell cell-c">–</span> cancelled
        </li>
        <li>
          <span class="informative">◆</span> informative: rewards differ within the group
        </li>
      </ul>
      {groups.problem ? <Failure problem={groups.problem} retry={groups.reload} /> : null}
      {!groups.ready ? <Waiting slow={groups.slow} what="groups" /> : null}
      {groups.ready && groups.items.length === 0 && !groups.problem ? <NoGroups filtered={filtered} /> : null}
      {groups.items.length > 0 ? (
        <WindowedList
          rows={groups.items.length}
          rowHeight={GROUP_ROW_HEIGHT}
          row={row}
          role="grid"
          label="Groups and their samples"
          class="grid"
          holder={holder}
          memory={memory}
          onEnd={groups.next}
          onKeyDown={(event) => moveInGrid(event, holder.current, groups.items.length, GROUP_ROW_HEIGHT)}
          header={
            <div class="grid-row grid-head" role="row">
              <span role="columnheader" class="number">
                No
              </span>
              <span role="columnheader">Task</span>
              <span role="columnheader">Signal</span>
              <span role="columnheader">State</span>
              <span role="columnheader" class="number">
                Mean
              </span>
              <span role="columnheader">Samples</span>
            </div>
          }
        />
      ) : null}
    </>
  );
}

function NoGroups({ filtered }: { filtered: boolean }): JSX.Element {
  const { router } = useServices();
  return filtered ? (
    <Empty title="No group matches these filters.">
      <button type="button" onClick={() => router.change({ status: null, informative: null, search: null })}>
        Remove the filters
      </button>
    </Empty>
  ) : (
    <Empty title="This job has no groups yet.">
      <p>They appear when its tasks have been read. A job with a stream of tasks waits for its trainer to send some.</p>
    </Empty>
  );
}

/** Write the beginning that all ids of a page share before each of them: the answer has it once. */
function withWholeIds(page: GridPage): Page<GridRow> {
  const whole = ([id, letter, value]: GridSample): GridSample => [page.prefix + id, letter, value];
  return { ...page, items: page.items.map((row) => ({ ...row, samples: row.samples.map(whole) })) };
}
