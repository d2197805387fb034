/** Pools and their backends. */

import type { JSX } from "preact";
import type { Backend, Pool } from "../../api/types";
import { Empty } from "../../parts/feedback";
import { Badge } from "../../parts/status";
import { brief, count, percent } from "../../text/format";
import { shortened, visible, visibleLine } from "../../text/visible";
import { Meter } from "./Queues";

export function Pools({ pools }: { pools: Pool[] }): JSX.Element {
  return (
    <section class="panel" aria-labelledby="pools-title">
      <h2 id="pools-title">Pools and backends</h2>
      {pools.length === 0 ? (
        <Empty title="There are no pools.">
          <p>
            A pool lists the servers that sample tokens. <code>rollyard submit -f pool.yaml</code> makes one.
          </p>
        </Empty>
      ) : (
        <div class="scroll-x" tabIndex={0} role="group" aria-label="Table of backends">
          <table class="rows">
            <thead>
              <tr>
                <th scope="col">Backend</th>
                <th scope="col">Health</th>
                <th scope="col">Load</th>
                <th scope="col" class="number">
                  Tokens/s
                </th>
                <th scope="col" class="number">
                  Cache hits
                </th>
                <th scope="col">Weights</th>
                <th scope="col">Message</th>
              </tr>
            </thead>
            {pools.map((pool) => (
              <tbody key={`${pool.namespace}/${pool.name}`}>
                <tr class="row-group">
                  <th scope="rowgroup" colSpan={7}>
                    {pool.namespace === "default" ? "" : `${visibleLine(pool.namespace)}/`}
                    {visibleLine(pool.name)} <span class="muted">{visibleLine(shortened(pool.model, 80))}</span> <Badge status={pool.phase} />
                    {pool.paused ? <Badge status="Paused" tone="warn" /> : null}
                    <span class="muted"> weights {visibleLine(pool.policy_version || "–")}</span>
                  </th>
                </tr>
                {pool.backends.map((backend) => (
                  <BackendLine key={backend.url} backend={backend} current={pool.policy_version} />
                ))}
              </tbody>
            ))}
          </table>
        </div>
      )}
    </section>
  );
}

function BackendLine({ backend, current }: { backend: Backend; current: string | null }): JSX.Element {
  // A pool whose weights were never updated has no version of its own.
  const behind = Boolean(backend.policy_version && current) && backend.policy_version !== current;
  const share = backend.max_active ? backend.active / backend.max_active : null;
  return (
    <tr>
      <th scope="row" class="mono clip" title={visible(backend.url)}>
        {visibleLine(backend.url)}
      </th>
      <td>
        <Badge status={backend.ready ? "Ready" : "Not ready"} tone={backend.ready ? "good" : "bad"} />
        {backend.circuit && backend.circuit.toLowerCase() !== "closed" ? <Badge status={`circuit ${backend.circuit.toLowerCase()}`} tone="warn" /> : null}
      </td>
      <td>
        {share === null ? `${count(backend.active)} at work` : <Meter share={share} label="Load" />}
        {backend.max_active ? (
          <span class="muted">
            {count(backend.active)} of {count(backend.max_active)}
          </span>
        ) : null}
      </td>
      <td class="number">{brief(backend.speed)}</td>
      <td class="number">{percent(backend.kv_hits)}</td>
      <td>
        {visibleLine(backend.policy_version || "–")} {behind ? <Badge status="behind" tone="warn" /> : null}
        {backend.weights ? <span class="muted"> {visibleLine(backend.weights)}</span> : null}
      </td>
      <td class="clip" title={visible(backend.message)}>
        {visibleLine(shortened(backend.message, 200))}
      </td>
    </tr>
  );
}
