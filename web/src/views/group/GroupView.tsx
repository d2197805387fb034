/** The samples of one task side by side, and where two of them part ways. */

import type { JSX } from "preact";
import { Calls } from "../../api/calls";
import type { Page, RolloutRow } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Badge, stateName, toneOf } from "../../parts/status";
import { useKeys } from "../../state/keys";
import { wordOf } from "../../state/place";
import { useJobRefresh, useResource } from "../../state/resource";
import { useLocation, useServices } from "../../state/services";
import { Choice } from "../../parts/fields";
import { count, counted, reward } from "../../text/format";
import { visibleLine } from "../../text/visible";
import { Gone } from "../Gone";
import { shadeOfReward } from "../job/GroupRow";
import { Compare } from "./Compare";
import { SampleColumn } from "./SampleColumn";

/** Samples of a call; a group has at most 1,024. */
const LIMIT = 200;
/** Columns that are drawn at once; a button brings more. */
const COLUMNS = 16;

export function GroupView({ namespace, name, task }: { namespace: string; name: string; task: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const sort = wordOf(query, "sort", ["-reward", "reward", "sample"]);
  const shown = Math.max(COLUMNS, Math.min(LIMIT, Number(query.get("columns")) || COLUMNS));
  const group = useResource<RolloutRow[]>(`group ${namespace}/${name}/${task}`, async (signal) => {
    const page = await calls.get<Page<RolloutRow>>(
      `${Calls.job(name)}/rollouts`,
      { namespace, slim: true, task, sort: "id", limit: LIMIT },
      signal,
    );
    return page.items;
  });
  useJobRefresh(namespace, name, group.reload, 2_000);
  useKeys({ u: () => router.go(router.href({ view: "job", namespace, name })) });

  if (group.problem?.status === 404) return <Gone namespace={namespace} name={name} deleted={false} />;
  if (group.problem && !group.data) return <Failure problem={group.problem} retry={group.reload} />;
  if (!group.data) return <Waiting slow={group.slow} what="the group" />;
  const samples = ordered(group.data, sort);
  if (samples.length === 0) {
    return (
      <Empty title="This job has no group of that task.">
        <Link href={router.href({ view: "job", namespace, name })}>Go to the job's groups</Link>
      </Empty>
    );
  }
  const rewards = samples.map((sample) => sample.reward).filter((value): value is number => value !== null);
  const least = Math.min(0, ...rewards);
  const most = Math.max(1, ...rewards);
  const varied = new Set(rewards).size > 1;
  return (
    <div class="group">
      <section class="panel head" aria-labelledby="group-title">
        <div class="panel-head">
          <h1 id="group-title">{visibleLine(task)}</h1>
          {varied ? (
            <span class="informative" title="Rewards differ within the group">
              ◆ informative
            </span>
          ) : null}
          <span class="grow" />
          <Choice
            label="Order"
            value={sort}
            choices={[
              ["-reward", "highest reward first"],
              ["reward", "lowest reward first"],
              ["sample", "by sample"],
            ]}
            onChange={(value) => router.change({ sort: value === "-reward" ? null : value })}
          />
        </div>
        <p class="figures">
          <b>{counted(samples.length, "sample")}</b>, <b>{count(rewards.length)}</b> with a reward, mean{" "}
          <b>{rewards.length ? reward(rewards.reduce((a, b) => a + b, 0) / rewards.length) : "–"}</b>
        </p>
        <ul class="sample-strip" aria-label="Samples">
          {samples.map((sample) => (
            <li key={sample.id}>
              <Link
                href={router.href({ view: "rollout", namespace, name, id: sample.id })}
                class={`reward-chip ${sample.reward === null ? "" : `shade-${shadeOfReward(sample.reward, least, most)}`}`}
                label={`sample ${sample.sample}, ${stateName(sample.status)}, reward ${reward(sample.reward)}`}
              >
                #{sample.sample} {sample.reward === null ? <Badge status={stateName(sample.status)} tone={toneOf(sample.status)} /> : reward(sample.reward)}
              </Link>
            </li>
          ))}
        </ul>
      </section>
      <Compare samples={samples} namespace={namespace} name={name} />
      <div class="columns" tabIndex={0} role="region" aria-label="Samples side by side">
        {samples.slice(0, shown).map((sample) => (
          <SampleColumn key={sample.id} sample={sample} namespace={namespace} name={name} least={least} most={most} />
        ))}
      </div>
      {samples.length > shown ? (
        <button type="button" onClick={() => router.change({ columns: shown + COLUMNS })}>
          Show {count(Math.min(COLUMNS, samples.length - shown))} more samples
        </button>
      ) : null}
    </div>
  );
}

/** Sort by reward; samples without one come last. */
function ordered(samples: RolloutRow[], sort: string): RolloutRow[] {
  const sign = sort === "reward" ? 1 : -1;
  return [...samples].sort((a, b) => {
    if (sort === "sample" || (a.reward === null && b.reward === null)) return a.sample - b.sample;
    if (a.reward === null || b.reward === null) return a.reward === null ? 1 : -1;
    return sign * (a.reward - b.reward) || a.sample - b.sample;
  });
}
