/** A rollout's name, result and figures, and the way to its neighbours. */

import type { JSX } from "preact";
import type { Brief } from "../../api/types";
import { Link } from "../../parts/Link";
import { Badge } from "../../parts/status";
import { useServices } from "../../state/services";
import { count, duration, reward } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";
import { talksOf } from "./talks";
import { Fact } from "../job/JobHead";
import { shadeOfReward } from "../job/GroupRow";
import { exitOf } from "./HarnessPanel";

export interface RolloutHeadProps {
  brief: Brief;
  namespace: string;
  name: string;
  onOpen: (id: string | null) => void;
}

export function RolloutHead({ brief, namespace, name, onOpen }: RolloutHeadProps): JSX.Element {
  const { router } = useServices();
  const { timings, neighbours } = brief;
  const talks = talksOf(brief);
  const sampled = talks.flatMap((talk) => talk.turns).reduce((sum, turn) => sum + (turn.end - turn.start), 0);
  const trained = brief.segments.reduce((sum, segment) => sum + segment.sampled, 0);
  const seconds = timings.init.active_seconds + timings.run.active_seconds + timings.eval.active_seconds;
  const versions = Object.entries(brief.metadata).find(([key]) => key === "policy_version");
  return (
    <section class="panel head" aria-labelledby="rollout-title">
      <div class="panel-head">
        <h1 id="rollout-title">
          <Link href={router.href({ view: "group", namespace, name, task: brief.task_id })}>{visibleLine(brief.task_id)}</Link>{" "}
          <span class="muted">#{brief.sample_index}</span>
        </h1>
        <span class={brief.reward === null ? "muted" : `reward-chip big shade-${shadeOfReward(brief.reward, 0, 1)}`}>reward {reward(brief.reward)}</span>
        <Badge status={brief.status} />
        {brief.truncated ? <Badge status={`truncated: ${brief.truncated_reason}`} tone="warn" /> : null}
        <span class="grow" />
        <div class="neighbours" role="group" aria-label="Other samples">
          <Step name="‹ sample" title="Previous sample ([)" id={neighbours.sample_before} onOpen={onOpen} />
          <Step name="sample ›" title="Next sample (])" id={neighbours.sample_after} onOpen={onOpen} />
          <Step name="‹ failed" title="Previous failed sample ({)" id={neighbours.failed_before} onOpen={onOpen} />
          <Step name="failed ›" title="Next failed sample (})" id={neighbours.failed_after} onOpen={onOpen} />
        </div>
      </div>
      {brief.reason || brief.message ? (
        <p class="notice bad lines">
          <b>{visibleLine(brief.reason)}</b> {visible(brief.message)}
        </p>
      ) : null}
      <dl class="facts">
        <Fact name="Turns" value={count(talks.reduce((sum, talk) => sum + talk.turnsTotal, 0))} />
        {talks.length > 1 ? <Fact name="Conversations" value={count(talks.length)} /> : null}
        <Fact name="Sampled tokens" value={trained === sampled ? count(sampled) : `${count(sampled)}, ${count(trained)} to train on`} />
        <Fact name="Segments" value={count(brief.segments.length)} />
        <Fact name="Time at work" value={duration(seconds)} />
        <Fact name="Model" value={duration(timings.model_seconds)} />
        <Fact name="Tools" value={duration(timings.tool_seconds)} />
        <Fact name="Own code" value={duration(timings.own_seconds)} />
        {versions ? <Fact name="Policy version" value={String(versions[1])} /> : null}
        <Fact name="Backend" value={brief.backend || "–"} />
        {brief.tool_parser ? <Fact name="Tool parser" value={brief.tool_parser} /> : null}
        {brief.harness ? <Fact name="Harness" value={`${brief.harness.name}, ${exitOf(brief.harness)}`} /> : null}
        <Fact name="Id" value={brief.id} />
        {brief.trace_id ? <Fact name="Trace" value={brief.trace_id} /> : null}
      </dl>
    </section>
  );
}

function Step({ name, title, id, onOpen }: { name: string; title: string; id: string | null | undefined; onOpen: (id: string | null) => void }): JSX.Element {
  return (
    <button type="button" class="quiet" title={title} aria-label={title} disabled={!id} onClick={() => onOpen(id ?? null)}>
      {name}
    </button>
  );
}
