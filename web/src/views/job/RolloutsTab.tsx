/** A job's rollouts as a list, sorted, filtered and searched by the control plane. */

import type { JSX } from "preact";
import { useCallback, useMemo, useRef } from "preact/hooks";
import { Calls } from "../../api/calls";
import type { Page, RolloutRow, Statistics } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Choice, NumberField, Search } from "../../parts/fields";
import { Link } from "../../parts/Link";
import { Badge, stateName, toneOf } from "../../parts/status";
import { usePages } from "../../state/pages";
import { wordOf } from "../../state/place";
import { useCoalesced, useReopened } from "../../state/resource";
import { useLive, useLocation, useServices } from "../../state/services";
import { ago, brief, count, duration, moment, reward } from "../../text/format";
import { shortened, visible, visibleLine } from "../../text/visible";
import { WindowedList } from "../../window/WindowedList";
import { shadeOfReward } from "./GroupRow";

const SORTS = ["-ended", "ended", "-reward", "reward", "-duration", "duration", "-tokens", "since", "id"] as const;
const STATUSES = ["", "queued", "leased", "succeeded", "failed", "cancelled"] as const;
const STAGE_NAMES = ["", "init", "run", "eval"] as const;
const SINCE = ["", "300", "3600", "86400"] as const;
/** Pixels; the style sheet says the same. */
const ROW_HEIGHT = 28;
const LIMIT = 200;
/** Milliseconds between two readings of the first page while rollouts end. */
const REFRESH = 5_000;

export interface RolloutsTabProps {
  namespace: string;
  name: string;
  now: number;
  rewards: Statistics["rewards"] | null;
}

export function RolloutsTab({ namespace, name, now, rewards }: RolloutsTabProps): JSX.Element {
  const { calls, clock, router } = useServices();
  const { query } = useLocation();
  const sort = wordOf(query, "sort", SORTS);
  const filters = {
    status: wordOf(query, "status", STATUSES),
    stage: wordOf(query, "stage", STAGE_NAMES),
    reason: query.get("reason") ?? "",
    min_reward: query.get("min") ?? "",
    max_reward: query.get("max") ?? "",
    task: query.get("task") ?? "",
    search: query.get("search") ?? "",
  };
  const within = wordOf(query, "after", SINCE);
  const key = JSON.stringify([namespace, name, sort, filters, within]);
  const rollouts = usePages<RolloutRow>(key, (cursor, signal) => {
    // The bound must be the same on every page of a list, since the place to continue belongs to the filters.
    const after = within === "" ? null : Math.floor((clock.now() - Number(within)) / 60) * 60;
    const params = { namespace, slim: true, sort, ...filters, after_time: after, limit: LIMIT, continue: cursor };
    return calls.get<Page<RolloutRow>>(`${Calls.job(name)}/rollouts`, params, signal);
  });
  const holder = useRef<HTMLDivElement | null>(null);
  const memory = useMemo(() => router.positions(), [router, key]);
  const refresh = useCoalesced(() => {
    if ((holder.current?.scrollTop ?? 0) < ROW_HEIGHT) rollouts.reload();
  }, REFRESH);
  useReopened(refresh);
  useLive("ended", (ended) => {
    if (ended.name !== name || ended.namespace !== namespace) return;
    const byId = new Map(ended.rollouts.map((row) => [row.id, row]));
    rollouts.patch((rows) => (rows.some((row) => byId.has(row.id)) ? rows.map((row) => byId.get(row.id) ?? row) : rows));
    refresh();
  }, [key, refresh]);

  const least = rewards?.min ?? 0;
  const most = rewards?.max ?? 1;
  const row = useCallback(
    (index: number) => {
      const rollout = rollouts.items[index];
      return rollout ? (
        <RolloutLine key={rollout.id} rollout={rollout} index={index} namespace={namespace} name={name} now={now} shade={shadeOfNullable(rollout.reward, least, most)} />
      ) : null;
    },
    [rollouts.items, namespace, name, now, least, most],
  );
  const set = (changes: Record<string, string | null>) => router.change(changes);
  const filtered = within !== "" || Object.values(filters).some((value) => value !== "");
  return (
    <>
      <div class="filters" role="search" aria-label="Filter rollouts">
        <Search value={filters.search} label="Words of the conversation" onChange={(text) => router.change({ search: text }, true)} />
        <Choice label="Order" value={sort} choices={ORDERS} onChange={(value) => set({ sort: value === "-ended" ? null : value })} />
        <Choice label="Status" value={filters.status} choices={STATUSES.map((value) => [value, stateName(value) || "any"])} onChange={(value) => set({ status: value })} />
        <Choice label="Stage" value={filters.stage} choices={STAGE_NAMES.map((value) => [value, value || "any"])} onChange={(value) => set({ stage: value })} />
        <Choice
          label="Ended"
          value={within}
          choices={[
            ["", "any time"],
            ["300", "last 5 min"],
            ["3600", "last hour"],
            ["86400", "last day"],
          ]}
          onChange={(value) => set({ after: value })}
        />
        <NumberField label="Least reward" value={filters.min_reward} onChange={(text) => router.change({ min: text }, true)} />
        <NumberField label="Most reward" value={filters.max_reward} onChange={(text) => router.change({ max: text }, true)} />
        {filters.reason ? <Chip name={`reason ${filters.reason}`} onRemove={() => set({ reason: null })} /> : null}
        {filters.task ? <Chip name={`task ${filters.task}`} onRemove={() => set({ task: null })} /> : null}
        <span class="muted" role="status">
          {rollouts.ready ? `${count(rollouts.items.length)}${rollouts.more ? "+" : ""} rollouts` : ""}
        </span>
      </div>
      {rollouts.problem ? <Failure problem={rollouts.problem} retry={rollouts.reload} /> : null}
      {!rollouts.ready ? <Waiting slow={rollouts.slow} what="rollouts" /> : null}
      {rollouts.ready && rollouts.items.length === 0 && !rollouts.problem ? (
        <Empty title={filtered ? "No rollout matches these filters." : "No rollout has ended yet."}>
          {filtered ? (
            <button type="button" onClick={() => router.change({ status: null, stage: null, reason: null, min: null, max: null, task: null, search: null, after: null })}>
              Remove the filters
            </button>
          ) : (
            <button type="button" onClick={() => set({ sort: "id" })}>
              List those that have not ended
            </button>
          )}
        </Empty>
      ) : null}
      {rollouts.items.length > 0 ? (
        <WindowedList
          rows={rollouts.items.length}
          rowHeight={ROW_HEIGHT}
          row={row}
          role="table"
          label="Rollouts"
          class="rollouts"
          holder={holder}
          memory={memory}
          onEnd={rollouts.next}
          header={<Head sort={sort} onSort={(value) => set({ sort: value })} />}
        />
      ) : null}
    </>
  );
}

const ORDERS = [
  ["-ended", "last ended first"],
  ["ended", "first ended first"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-duration", "longest"],
  ["duration", "shortest"],
  ["-tokens", "most tokens"],
  ["since", "longest in its state"],
  ["id", "all, as submitted"],
] as const;

function shadeOfNullable(value: number | null, least: number, most: number): string {
  return value === null ? "" : `shade-${shadeOfReward(value, least, most)}`;
}

function Chip({ name, onRemove }: { name: string; onRemove: () => void }): JSX.Element {
  return (
    <button type="button" class="chip" onClick={onRemove} aria-label={`Remove the filter ${visibleLine(name)}`}>
      {visibleLine(shortened(name, 60))} <span aria-hidden="true">✕</span>
    </button>
  );
}

/** Column heads; a click on one sorts by it, and a second click turns the order round. */
function Head({ sort, onSort }: { sort: string; onSort: (sort: string) => void }): JSX.Element {
  const column = (name: string, up: string | null, down: string) => {
    const direction = sort === down ? "descending" : sort === up ? "ascending" : "none";
    return (
      <span role="columnheader" aria-sort={direction}>
        <button type="button" class="sorter" onClick={() => onSort(sort === down && up !== null ? up : down)}>
          {name}
          <span aria-hidden="true">{direction === "descending" ? " ↓" : direction === "ascending" ? " ↑" : ""}</span>
        </button>
      </span>
    );
  };
  return (
    <div class="list-row list-head" role="row">
      <span role="columnheader">Task and sample</span>
      <span role="columnheader">Status</span>
      {column("Reward", "reward", "-reward")}
      {column("Time", "duration", "-duration")}
      {column("Tokens", null, "-tokens")}
      <span role="columnheader">Failures</span>
      <span role="columnheader">Version</span>
      <span role="columnheader">Worker</span>
      {column("Ended", "ended", "-ended")}
    </div>
  );
}

interface LineProps {
  rollout: RolloutRow;
  index: number;
  namespace: string;
  name: string;
  now: number;
  shade: string;
}

function RolloutLine({ rollout, index, namespace, name, now, shade }: LineProps): JSX.Element {
  const { router } = useServices();
  const state = `${rollout.stage === null ? "" : `${rollout.stage} `}${stateName(rollout.status)}`;
  return (
    <div class="list-row" role="row" aria-rowindex={index + 2}>
      <span role="cell" class="clip">
        <Link href={router.href({ view: "rollout", namespace, name, id: rollout.id })} title={visible(rollout.task_id)}>
          {visibleLine(shortened(rollout.task_id, 100))} <span class="muted">#{rollout.sample}</span>
        </Link>
      </span>
      <span role="cell" class="clip" title={visible(rollout.reason)}>
        <Badge status={state} tone={toneOf(rollout.status)} />{" "}
        <span class="muted">{visibleLine(rollout.reason)}</span>
      </span>
      <span role="cell" class="number">
        <span class={rollout.reward === null ? "" : `reward-chip ${shade}`}>{reward(rollout.reward)}</span>
      </span>
      <span role="cell" class="number">
        {duration(rollout.seconds)}
      </span>
      <span role="cell" class="number">
        {brief(rollout.tokens)}
      </span>
      <span role="cell" class="number">
        {rollout.attempts ? count(rollout.attempts) : <span class="muted">0</span>}
      </span>
      <span role="cell" class="clip">
        {visibleLine(rollout.policy_version ?? "–")}
      </span>
      <span role="cell" class="clip muted" title={visible(rollout.worker ?? "")}>
        {visibleLine(rollout.worker ?? "–")}
      </span>
      <span role="cell" class="number" title={moment(rollout.ended_at ?? rollout.since)}>
        {ago(rollout.ended_at, now)}
      </span>
    </div>
  );
}
