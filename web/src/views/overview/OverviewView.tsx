/** The whole fleet: jobs, queues, rates, backends, and workers with their nodes. */

import type { JSX } from "preact";
import { useLive, useNow, useServices } from "../../state/services";
import { useCoalesced, useReopened, useResource } from "../../state/resource";
import type { Overview } from "../../api/types";
import { Failure, Waiting } from "../../parts/feedback";
import { count } from "../../text/format";
import { Fleet } from "./Fleet";
import { Jobs } from "./Jobs";
import { Pools } from "./Pools";
import { Queues } from "./Queues";

/** Milliseconds between two readings of workers and nodes, which events do not carry. */
const REFRESH = 10_000;
const PHASES = ["Pending", "Init", "Run", "Eval", "Succeeded", "Failed", "Cancelled"];

export function OverviewView(): JSX.Element {
  const { calls, clock } = useServices();
  const overview = useResource<Overview>("overview", async (signal) => {
    const answer = await calls.get<Overview>("/overview", {}, signal);
    clock.heard(answer.time);
    return answer;
  });
  const now = useNow(5);
  const ask = useCoalesced(overview.reload, REFRESH);
  useReopened(overview.reload);
  useLive("overview", (data) => {
    // The event has no workers and nodes: these are read again, less often.
    overview.patch((before) => ({ ...before, ...data }));
    ask();
  }, [ask]);

  const data = overview.data;
  return (
    <div class="overview">
      <h1 class="visually-hidden">Overview</h1>
      {overview.problem ? <Failure problem={overview.problem} retry={overview.reload} /> : null}
      {data ? (
        <>
          <ul class="facts" aria-label="Jobs by phase">
            {PHASES.map((phase) => (
              <li key={phase}>
                <b>{count(data.phases[phase] ?? 0)}</b> {phase}
              </li>
            ))}
          </ul>
          <Queues queues={data.queues} rates={data.rates} />
        </>
      ) : (
        <Waiting slow={overview.slow} what="the overview" />
      )}
      <Jobs now={now} />
      {data ? (
        <>
          <Pools pools={data.pools} />
          <Fleet nodes={data.nodes ?? []} workers={data.workers ?? []} more={data.more ?? 0} now={now} />
        </>
      ) : null}
    </div>
  );
}
