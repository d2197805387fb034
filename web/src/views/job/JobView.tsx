/** One job: where it stands, what its rewards are, what failed, where time goes, and its groups and rollouts. */

import type { JSX } from "preact";
import type { JobRow, Page, RolloutJob, Statistics } from "../../api/types";
import { Calls } from "../../api/calls";
import { Failure, Waiting } from "../../parts/feedback";
import { Tabs } from "../../parts/Tabs";
import { useKeys } from "../../state/keys";
import { wordOf } from "../../state/place";
import { useJobRefresh, useReopened, useResource } from "../../state/resource";
import { useLive, useLocation, useNow, useServices } from "../../state/services";
import { Gone } from "../Gone";
import { GanttTab } from "./GanttTab";
import { GroupsTab } from "./GroupsTab";
import { JobHead } from "./JobHead";
import { RolloutsTab } from "./RolloutsTab";
import { Summary } from "./Summary";

const TABS = ["groups", "rollouts", "gantt"] as const;
/** Every filter and selection of the tabs; another tab begins without those that it does not know. */
const TAB_VALUES = ["sort", "status", "reason", "task", "search", "min", "max", "stage", "informative", "after", "before"];

/**
 * Milliseconds between two readings of figures, and of the resource, whose conditions no event carries. Counts and
 * cells follow events; twenty open pages must not cost the control plane more than a few hundredths of a core.
 */
const STATISTICS_REFRESH = 5_000;
const RESOURCE_REFRESH = 15_000;

export function JobView({ namespace, name }: { namespace: string; name: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
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

  useJobRefresh(namespace, name, statistics.reload, STATISTICS_REFRESH);
  useJobRefresh(namespace, name, job.reload, RESOURCE_REFRESH);
  useReopened(row.reload);
  useLive("job", (fresh) => {
    if (fresh.name === name && fresh.namespace === namespace) row.patch(() => fresh);
  }, [namespace, name]);

  const select = (id: string) => {
    const nothing = Object.fromEntries(TAB_VALUES.map((value) => [value, null]));
    router.change({ ...nothing, tab: id === "groups" ? null : id });
  };
  useKeys({ "1": () => select("groups"), "2": () => select("rollouts"), "3": () => select("gantt"), u: () => router.go(router.href({ view: "overview" })) });

  if (job.problem?.status === 404) return <Gone namespace={namespace} name={name} deleted={job.data !== null} />;
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
