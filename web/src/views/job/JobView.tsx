/** One job: where it stands, what its rewards are, what failed, where time goes, and its groups and rollouts. */

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import type { JobRow, Page, RolloutJob, Statistics } from "../../api/types";
import { Calls } from "../../api/calls";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Tabs } from "../../parts/Tabs";
import { useKeys } from "../../state/keys";
import { wordOf } from "../../state/place";
import { useJobRefresh, useReopened, useResource } from "../../state/resource";
import { useLive, useLocation, useNow, useServices } from "../../state/services";
import { visibleLine } from "../../text/visible";
import { GanttTab } from "./GanttTab";
import { GroupsTab } from "./GroupsTab";
import { JobHead } from "./JobHead";
import { RolloutsTab } from "./RolloutsTab";
import { Summary } from "./Summary";

const TABS = ["groups", "rollouts", "gantt"] as const;
/** Every filter and selection of the tabs; another tab begins without those that it does not know. */
const TAB_VALUES = ["sort", "status", "reason", "task", "search", "min", "max", "stage", "informative", "after", "before"];

/** Milliseconds between two readings of the resource itself, whose conditions no event carries. */
const RESOURCE_REFRESH = 3_000;

export function JobView({ namespace, name }: { namespace: string; name: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const [gone, setGone] = useState(false);
  const path = Calls.job(name);
  const job = useResource<RolloutJob>(`job ${namespace}/${name}`, (signal) => calls.get(path, { namespace }, signal));
  const row = useResource<JobRow | null>(`row ${namespace}/${name}`, async (signal) => {
    const found = await calls.get<Page<JobRow>>("/jobs", { namespace, search: name, limit: 200 }, signal);
    return found.items.find((item) => item.name === name && item.namespace === namespace) ?? null;
  });
  const statistics = useResource<Statistics>(`statistics ${namespace}/${name}`, (signal) =>
    calls.get(`${path}/statistics`, { namespace }, signal),
  );
  const now = useNow(2);
  const tab = wordOf(query, "tab", TABS);

  useJobRefresh(namespace, name, statistics.reload);
  useJobRefresh(namespace, name, job.reload, RESOURCE_REFRESH);
  useReopened(row.reload);
  useLive("job", (fresh) => {
    if (fresh.name === name && fresh.namespace === namespace) row.patch(() => fresh);
  }, [namespace, name]);
  useLive("gone", (which) => {
    if (which.name === name && which.namespace === namespace) setGone(true);
  }, [namespace, name]);

  const select = (id: string) => {
    const nothing = Object.fromEntries(TAB_VALUES.map((value) => [value, null]));
    router.change({ ...nothing, tab: id === "groups" ? null : id });
  };
  useKeys({ "1": () => select("groups"), "2": () => select("rollouts"), "3": () => select("gantt"), u: () => router.go(router.href({ view: "overview" })) });

  if (gone || job.problem?.status === 404) return <Gone namespace={namespace} name={name} deleted={gone} />;
  if (job.problem && !job.data) return <Failure problem={job.problem} retry={job.reload} />;
  if (!job.data) return <Waiting slow={job.slow} what="the job" />;
  return (
    <div class="job">
      <JobHead job={job.data} row={row.data} now={now} />
      {statistics.problem ? <Failure problem={statistics.problem} retry={statistics.reload} /> : null}
      {statistics.data ? (
        <Summary statistics={statistics.data} row={row.data} namespace={namespace} name={name} />
      ) : (
        <Waiting slow={statistics.slow} what="statistics" />
      )}
      <Tabs
        label="Parts of the job"
        tabs={[
          { id: "groups", name: "Groups" },
          { id: "rollouts", name: "Rollouts" },
          { id: "gantt", name: "Timeline" },
        ]}
        selected={tab}
        onSelect={select}
      >
        {tab === "groups" ? <GroupsTab namespace={namespace} name={name} rewards={statistics.data?.rewards ?? null} /> : null}
        {tab === "rollouts" ? <RolloutsTab namespace={namespace} name={name} now={now} rewards={statistics.data?.rewards ?? null} /> : null}
        {tab === "gantt" ? <GanttTab namespace={namespace} name={name} /> : null}
      </Tabs>
    </div>
  );
}

/** What stands in the place of a job that does not exist, or no longer. */
export function Gone({ namespace, name, deleted }: { namespace: string; name: string; deleted: boolean }): JSX.Element {
  const { router } = useServices();
  return (
    <Empty title={deleted ? "This job was deleted." : "There is no such job."}>
      <p>
        {deleted ? "Its rollouts are gone with it: " : "It may have been deleted, or the link may be wrong: "}
        <code>
          {visibleLine(namespace)}/{visibleLine(name)}
        </code>
      </p>
      <Link href={router.href({ view: "overview" })}>Go to the overview</Link>
    </Empty>
  );
}
