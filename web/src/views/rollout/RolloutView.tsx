/** One rollout: its conversation, its tokens, its time, and what Eval said. */

import type { JSX } from "preact";
import { Calls } from "../../api/calls";
import { filledBrief } from "../../api/records";
import type { Brief } from "../../api/types";
import { Empty, Failure, Waiting } from "../../parts/feedback";
import { Link } from "../../parts/Link";
import { Tabs } from "../../parts/Tabs";
import { useKeys } from "../../state/keys";
import { wordOf } from "../../state/place";
import { useReopened, useResource } from "../../state/resource";
import { useLive, useLocation, useServices } from "../../state/services";
import { count } from "../../text/format";
import { visibleLine } from "../../text/visible";
import { Conversations } from "./Conversation";
import { EvalTab } from "./EvalTab";
import { LiveRollout } from "./LiveRollout";
import { RawTab } from "./RawTab";
import { RolloutHead } from "./RolloutHead";
import { TimelineTab } from "./TimelineTab";
import { TokensTab } from "./TokensTab";

const TABS = ["conversation", "tokens", "timeline", "eval", "raw"] as const;

export function RolloutView({ namespace, name, id }: { namespace: string; name: string; id: string }): JSX.Element {
  const { calls, router } = useServices();
  const { query } = useLocation();
  const tab = wordOf(query, "tab", TABS);
  const path = Calls.job(name, "rollouts", id);
  const brief = useResource<Brief>(`brief ${namespace}/${name}/${id}`, async (signal) =>
    filledBrief(await calls.get(`${path}/brief`, { namespace }, signal)),
  );
  useLive("ended", (ended) => {
    if (ended.name === name && ended.namespace === namespace && ended.rollouts.some((row) => row.id === id)) brief.reload();
  }, [id]);

  useReopened(() => {
    // The record of a rollout that has ended does not change.
    if (brief.data === null) brief.reload();
  });

  const data = brief.data;
  const neighbours = data?.neighbours;
  const select = (value: string) => router.change({ tab: value === "conversation" ? null : value, segment: null, token: null, conversation: null, message: null });
  const open = (other: string | null | undefined) => {
    // The tab stays, so that one can look at the tokens of one sample after another.
    if (other) router.go(router.href({ view: "rollout", namespace, name, id: other }, { tab: tab === "conversation" ? null : tab }));
  };
  useKeys({
    "[": () => open(neighbours?.sample_before),
    "]": () => open(neighbours?.sample_after),
    "{": () => open(neighbours?.failed_before),
    "}": () => open(neighbours?.failed_after),
    u: () => router.go(data ? router.href({ view: "group", namespace, name, task: data.task_id }) : router.href({ view: "job", namespace, name })),
    ...Object.fromEntries(TABS.map((value, index) => [String(index + 1), () => select(value)])),
  });

  if (brief.problem?.status === 409) return <LiveRollout namespace={namespace} name={name} id={id} onEnded={brief.reload} />;
  if (brief.problem?.status === 404) return <GoneRollout namespace={namespace} name={name} id={id} />;
  if (brief.problem && !data) return <Failure problem={brief.problem} retry={brief.reload} />;
  if (!data) return <Waiting slow={brief.slow} what="the rollout" />;
  const tokens = data.segments.reduce((sum, segment) => sum + segment.prompt + segment.response, 0);
  return (
    <div class="rollout">
      <RolloutHead brief={data} namespace={namespace} name={name} onOpen={open} />
      <Tabs
        label="Parts of the rollout"
        tabs={[
          { id: "conversation", name: "Conversation", extra: count(data.branches.reduce((sum, branch) => sum + branch.messages, data.messages)) },
          { id: "tokens", name: "Tokens", extra: count(tokens) },
          { id: "timeline", name: "Timeline", ...(data.attempts.length ? { extra: count(data.attempts.length) } : {}) },
          { id: "eval", name: "Eval" },
          { id: "raw", name: "Raw" },
        ]}
        selected={tab}
        onSelect={select}
      >
        {tab === "conversation" ? <Conversations key={id} brief={data} namespace={namespace} name={name} /> : null}
        {tab === "tokens" ? <TokensTab key={id} brief={data} namespace={namespace} name={name} /> : null}
        {tab === "timeline" ? <TimelineTab brief={data} /> : null}
        {tab === "eval" ? <EvalTab brief={data} /> : null}
        {tab === "raw" ? <RawTab key={id} namespace={namespace} name={name} id={id} /> : null}
      </Tabs>
    </div>
  );
}

function GoneRollout({ namespace, name, id }: { namespace: string; name: string; id: string }): JSX.Element {
  const { router } = useServices();
  return (
    <Empty title="There is no such rollout.">
      <p>
        <code>{visibleLine(id)}</code> is not known. Its job may have been deleted, or its record may no longer be kept.
      </p>
      <Link href={router.href({ view: "job", namespace, name })}>Go to the job</Link>{" "}
      <Link href={router.href({ view: "overview" })}>Go to the overview</Link>
    </Empty>
  );
}
