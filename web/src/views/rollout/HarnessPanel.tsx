/** How the harness of a rollout ended, and what it printed. The policy may have written any of it. */

import type { JSX } from "preact";
import type { HarnessEnd } from "../../api/types";
import { Badge } from "../../parts/status";
import { count, duration } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";

export function HarnessPanel({ harness }: { harness: HarnessEnd }): JSX.Element {
  return (
    <section class="panel harness" aria-labelledby="harness-title">
      <div class="panel-head">
        <h2 id="harness-title">Harness {visibleLine(harness.name)}</h2>
        <Badge status={exitOf(harness)} tone={harness.exit_code === 0 ? "good" : "bad"} />
        <span class="muted">{duration(harness.seconds)}</span>
      </div>
      <Printed name="Output" text={harness.output} />
      <Printed name="Log" text={harness.log} />
    </section>
  );
}

/** How a harness ended, in words. */
export function exitOf(harness: HarnessEnd): string {
  return harness.exit_code === null ? "killed, or not started" : `exit status ${harness.exit_code}`;
}

function Printed({ name, text }: { name: string; text: string }): JSX.Element {
  if (text === "") return <p class="muted">{name}: nothing.</p>;
  return (
    <details>
      <summary>
        {name} <span class="muted">{count(text.length)} characters</span>
      </summary>
      <pre class="text mono output" tabIndex={0} aria-label={`${name} of the harness`}>
        {visible(text)}
      </pre>
    </details>
  );
}
