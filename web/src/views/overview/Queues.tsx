/** Queues by stage with their slots, and the rates of the last minutes. */

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Overview } from "../../api/types";
import { STAGES } from "../../api/types";
import { Chart } from "../../parts/Chart";
import { brief, count, percent } from "../../text/format";

export function Queues({ queues, rates }: { queues: Overview["queues"]; rates: Overview["rates"] }): JSX.Element {
  const series = useMemo(() => {
    const seconds = Math.max(1, rates.bucket_seconds);
    return {
      xs: rates.rollouts.map((_, index) => rates.start + index * seconds),
      rollouts: rates.rollouts.map((n) => n / seconds),
      tokens: rates.tokens.map((n) => n / seconds),
    };
  }, [rates]);
  return (
    <div class="panels">
      <section class="panel" aria-labelledby="queues-title">
        <h2 id="queues-title">Queues and slots</h2>
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">Stage</th>
              <th scope="col" class="number">
                Waiting
              </th>
              <th scope="col" class="number">
                At work
              </th>
              <th scope="col" class="number">
                Slots
              </th>
              <th scope="col">Busy</th>
            </tr>
          </thead>
          <tbody>
            {STAGES.map((stage) => {
              const load = queues[stage] ?? { queued: 0, active: 0, slots: 0 };
              const share = load.slots ? load.active / load.slots : null;
              return (
                <tr key={stage}>
                  <th scope="row">{stage}</th>
                  <td class="number">{count(load.queued)}</td>
                  <td class="number">{count(load.active)}</td>
                  <td class="number">{count(load.slots)}</td>
                  <td>
                    <Meter share={share} label={`${stage} slots busy`} />
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </section>
      <section class="panel" aria-label="Rollouts a second">
        <Chart title="Rollouts/s" xs={series.xs} ys={series.rollouts} time={true} format={rateText} />
      </section>
      <section class="panel" aria-label="Tokens a second">
        <Chart title="Tokens/s" xs={series.xs} ys={series.tokens} time={true} format={brief} colour="--accent-2" />
      </section>
    </div>
  );
}

function rateText(value: number): string {
  return value !== 0 && Math.abs(value) < 10 ? value.toFixed(1) : brief(value);
}

/** A share as a bar with its number beside it. */
export function Meter({ share, label }: { share: number | null; label: string }): JSX.Element {
  return (
    <span class="meter">
      <span class="meter-track" role="img" aria-label={`${label}: ${percent(share)}`}>
        <span class={share !== null && share >= 0.95 ? "meter-fill full" : "meter-fill"} style={{ width: `${100 * Math.min(1, share ?? 0)}%` }} />
      </span>
      <span class="meter-text">{percent(share)}</span>
    </span>
  );
}
