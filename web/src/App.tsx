/** The page as a whole: a session first, then the view that the address names. */

import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { CallError, Calls } from "./api/calls";
import { ServerClock } from "./api/clock";
import { Live } from "./api/live";
import type { Session } from "./api/types";
import { Boundary } from "./parts/Boundary";
import { Empty, Failure, Waiting } from "./parts/feedback";
import { Link } from "./parts/Link";
import { Shell } from "./parts/Shell";
import { asCallError } from "./state/resource";
import { type Place, pathOf } from "./state/place";
import { Router } from "./state/router";
import { type Services, ServicesContext, useLocation, useServices } from "./state/services";
import { WhileThere } from "./views/Gone";
import { GroupView } from "./views/group/GroupView";
import { JobView } from "./views/job/JobView";
import { OverviewView } from "./views/overview/OverviewView";
import { RolloutView } from "./views/rollout/RolloutView";
import { SignIn } from "./views/SignIn";

type Entry = { kind: "asking" } | { kind: "in"; session: Session | null } | { kind: "out"; refused: string | null } | { kind: "failed"; problem: CallError };

export function App({ prefix }: { prefix: string }): JSX.Element {
  const [entry, setEntry] = useState<Entry>({ kind: "asking" });
  const [turn, setTurn] = useState(0);
  const fixed = useMemo(() => {
    const clock = new ServerClock();
    const calls = new Calls(prefix, clock, () => setEntry((before) => (before.kind === "out" ? before : { kind: "out", refused: null })));
    const live = new Live(
      (job) => calls.address("/events", { job }),
      () => void calls.get("/session").catch(() => undefined),
    );
    return { clock, calls, live, router: new Router(prefix) };
  }, [prefix]);

  useEffect(() => {
    setEntry({ kind: "asking" });
    void enter(fixed.calls).then(setEntry);
  }, [fixed, turn]);
  useEffect(() => {
    if (entry.kind === "out") fixed.live.stop();
  }, [fixed, entry.kind]);

  if (entry.kind === "asking") return <Waiting slow={true} what="the page" />;
  if (entry.kind === "out") return <SignIn refused={entry.refused} />;
  if (entry.kind === "failed") return <Failure problem={entry.problem} retry={() => setTurn(turn + 1)} />;
  const services: Services = { ...fixed, session: entry.session };
  return (
    <ServicesContext.Provider value={services}>
      <Shell>
        <Placed />
      </Shell>
    </ServicesContext.Provider>
  );
}

/** Exchange the code of a link for a session, if there is one, and ask for the session. */
async function enter(calls: Calls): Promise<Entry> {
  const code = new URLSearchParams(window.location.hash.slice(1)).get("code");
  if (code !== null) {
    // The code leaves the address and the history at once, used or not.
    window.history.replaceState(null, "", window.location.pathname + window.location.search);
    try {
      await calls.post("/session", {}, { code });
    } catch (error) {
      const problem = asCallError(error);
      if (problem.passing) return { kind: "failed", problem };
      const session = await calls.get<Session>("/session").catch(() => null);
      if (session) return { kind: "in", session };
      return { kind: "out", refused: "This link was used before, or it is older than a minute. Make another one." };
    }
  }
  try {
    return { kind: "in", session: await calls.get<Session>("/session") };
  } catch (error) {
    const problem = asCallError(error);
    if (problem.status === 401) return { kind: "out", refused: null };
    // A control plane that asks for no sign-in has no sessions either.
    return problem.status === 404 ? { kind: "in", session: null } : { kind: "failed", problem };
  }
}

/** The view with a boundary of its own: going elsewhere leaves a fault behind. */
function Placed(): JSX.Element {
  const { place } = useLocation();
  return (
    <Boundary key={pathOf(place)}>
      <View />
    </Boundary>
  );
}

function JobPlace({ place }: { place: Exclude<Place, { view: "overview" | "unknown" }> }): JSX.Element {
  const { namespace, name } = place;
  switch (place.view) {
    case "job":
      return <JobView namespace={namespace} name={name} />;
    case "group":
      return <GroupView key={place.task} namespace={namespace} name={name} task={place.task} />;
    default:
      return <RolloutView namespace={namespace} name={name} id={place.id} />;
  }
}

function View(): JSX.Element {
  const { live, router } = useServices();
  const { place } = useLocation();
  const job = "namespace" in place ? `${place.namespace}/${place.name}` : null;
  useEffect(() => live.follow(job), [live, job]);
  useEffect(() => {
    document.title = "name" in place ? `${"id" in place ? `${place.id} · ` : ""}${place.name} · Rollyard` : "Rollyard";
  }, [place]);
  if (place.view !== "overview" && place.view !== "unknown") {
    return (
      <WhileThere key={job} namespace={place.namespace} name={place.name}>
        <JobPlace place={place} />
      </WhileThere>
    );
  }
  switch (place.view) {
    case "overview":
      return <OverviewView />;
    default:
      return (
        <Empty title="There is nothing at this address.">
          <Link href={router.href({ view: "overview" })}>Go to the overview</Link>
        </Empty>
      );
  }
}
