/** A job in figures: rewards, their curve, failures by reason, and where the time goes. */

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { JobRow, Statistics } from "../../api/types";
import { STAGES } from "../../api/types";
import { Chart } from "../../parts/Chart";
import { Histogram } from "../../parts/Histogram";
import { Link } from "../../parts/Link";
import { Choice } from "../../parts/fields";
import { useLocation, useServices } from "../../state/services";
import { brief, count, duration, percent, reward } from "../../text/format";
import { visibleLine } from "../../text/visible";

export interface SummaryProps {
  statistics: Statistics;
  row: JobRow | null;
  namespace: string;
  name: string;
}

export function Summary(props: SummaryProps): JSX.Element {
  return (
    <div class="panels">
      <Rewards {...props} />
      <Curve {...props} />
      <Failures {...props} />
      <Times {...props} />
    </div>
  );
}

function Rewards({ statistics }: SummaryProps): JSX.Element {
  const { router } = useServices();
  const { rewards } = statistics;
  const choose = (from: number, to: number) =>
    router.change({ tab: "rollouts", min: rounded(from), max: rounded(to), sort: "-reward", status: null, reason: null });
  return (
    <section class="panel" aria-labelledby="rewards-title">
      <h2 id="rewards-title">Rewards</h2>
      {rewards.n > 0 && rewards.min !== null && rewards.max !== null ? (
        <>
          <Histogram bins={rewards.bins} min={rewards.min} max={rewards.max} onChoose={choose} />
          <p class="figures">
            mean <b>{reward(rewards.mean)}</b>, <b>{count(rewards.n)}</b> rewards, <b>{percent(rewards.ones / rewards.n)}</b> are 1,{" "}
            <b>{percent(rewards.zeros / rewards.n)}</b> are 0
          </p>
        </>
      ) : (
        <p class="muted">No rollout has a reward yet.</p>
      )}
    </section>
  );
}

/** A bound of a bin, without the noise of its sum, so that the filter's field can be read. */
function rounded(value: number): number {
  return Number(value.toPrecision(6));
}

function Curve({ statistics }: SummaryProps): JSX.Element {
  const { router } = useServices();
  const { query } = useLocation();
  const versions = statistics.by_version;
  const chosen = query.get("curve") ?? (versions.length > 1 ? "version" : "time");
  const series = useMemo(() => {
    if (chosen === "version") {
      return {
        xs: versions.map((_, index) => index),
        ys: versions.map((point) => point.mean),
        labels: versions.map((point) => visibleLine(point.version)),
      };
    }
    return { xs: statistics.by_time.map((point) => point.start), ys: statistics.by_time.map((point) => point.mean), labels: [] };
  }, [statistics, chosen]);
  return (
    <section class="panel" aria-label="Mean reward">
      <div class="panel-head tight">
        <h2>Mean reward</h2>
        <Choice
          label="by"
          value={chosen}
          choices={[
            ["time", "time"],
            ["version", "policy version"],
          ]}
          onChange={(value) => router.change({ curve: value }, true)}
        />
      </div>
      {series.xs.length > 0 ? (
        <Chart
          title={chosen === "version" ? "By policy version" : "By time"}
          xs={series.xs}
          ys={series.ys}
          time={chosen !== "version"}
          labels={series.labels}
          format={reward}
        />
      ) : (
        <p class="muted">The curve begins with the first reward.</p>
      )}
    </section>
  );
}

function Failures({ statistics, namespace, name }: SummaryProps): JSX.Element {
  const { router } = useServices();
  const nothing = statistics.failures.length === 0 && statistics.truncated.length === 0;
  return (
    <section class="panel" aria-labelledby="failures-title">
      <h2 id="failures-title">Failures by reason</h2>
      {nothing ? <p class="muted">No rollout has failed or was truncated.</p> : null}
      <ul class="reasons">
        {statistics.failures.map((failure) => (
          <li key={`${failure.reason} ${failure.stage}`}>
            <b class="number">{count(failure.n)}</b>
            <Link href={router.href({ view: "job", namespace, name }, { tab: "rollouts", status: "failed", reason: failure.reason })}>
              {visibleLine(failure.reason)}
            </Link>
            <span class="muted">{failure.stage ? `in ${failure.stage}` : ""}</span>
            {failure.example ? (
              <Link href={router.href({ view: "rollout", namespace, name, id: failure.example })} label={`An example of ${visibleLine(failure.reason)}`}>
                example
              </Link>
            ) : null}
          </li>
        ))}
        {statistics.truncated.map((truncated) => (
          <li key={truncated.reason}>
            <b class="number">{count(truncated.n)}</b>
            <span>{visibleLine(truncated.reason)}</span>
            <span class="muted">truncated</span>
          </li>
        ))}
      </ul>
    </section>
  );
}

function Times({ statistics }: SummaryProps): JSX.Element {
  const stages = STAGES.map((stage) => ({ stage, ...(statistics.stages[stage] ?? { queued: 0, active: 0, n: 0 }) }));
  const most = Math.max(1e-9, ...stages.map((stage) => stage.queued + stage.active));
  const parts = [
    { name: "model", seconds: statistics.model_seconds, fill: "fill-model" },
    { name: "tools", seconds: statistics.tool_seconds, fill: "fill-tools" },
    { name: "own code", seconds: statistics.own_seconds, fill: "fill-own" },
  ];
  const run = parts.reduce((sum, part) => sum + part.seconds, 0);
  return (
    <section class="panel" aria-labelledby="times-title">
      <h2 id="times-title">Where the time goes</h2>
      <table class="plain times">
        <thead>
          <tr>
            <th scope="col">Stage</th>
            <th scope="col">Means, by stage</th>
            <th scope="col" class="number">
              Waits
            </th>
            <th scope="col" class="number">
              Works
            </th>
          </tr>
        </thead>
        <tbody>
          {stages.map((stage) => (
            <tr key={stage.stage}>
              <th scope="row">{stage.stage}</th>
              <td>
                <span class="timebar" aria-hidden="true">
                  <span class="fill-queued" style={{ width: `${(100 * stage.queued) / most}%` }} />
                  <span class="fill-active" style={{ width: `${(100 * stage.active) / most}%` }} />
                </span>
              </td>
              <td class="number">{stage.n ? duration(stage.queued / stage.n) : "–"}</td>
              <td class="number">{stage.n ? duration(stage.active / stage.n) : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {run > 0 ? (
        <>
          <div class="statebar" role="img" aria-label={parts.map((part) => `${part.name} ${percent(part.seconds / run)}`).join(", ")}>
            {parts.map((part) => (
              <span key={part.name} class={part.fill} style={{ width: `${(100 * part.seconds) / run}%` }} />
            ))}
          </div>
          <ul class="legend">
            {parts.map((part) => (
              <li key={part.name}>
                <span class={`swatch ${part.fill}`} aria-hidden="true" />
                {part.name} <b>{percent(part.seconds / run)}</b> <span class="muted">{duration(part.seconds)}</span>
              </li>
            ))}
          </ul>
        </>
      ) : null}
      <p class="figures">
        <b>{brief(statistics.tokens)}</b> tokens to train on were sampled in <b>{count(statistics.upto)}</b> rollouts that have ended.
      </p>
    </section>
  );
}
