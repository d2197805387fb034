/** The record as JSON: its beginning as text, and all of it as a download. */

import type { JSX } from "preact";
import { Calls } from "../../api/calls";
import { Failure, Waiting } from "../../parts/feedback";
import { useResource } from "../../state/resource";
import { useServices } from "../../state/services";
import { visible } from "../../text/visible";

export function RawTab({ namespace, name, id }: { namespace: string; name: string; id: string }): JSX.Element {
  const { calls } = useServices();
  const path = Calls.job(name, "rollouts", id);
  const raw = useResource(`raw ${id}`, (signal) => calls.start(path, { namespace }, signal));
  return (
    <div class="raw">
      <p>
        <a href={calls.address(path, { namespace, download: true })} download={`${id}.json`}>
          Download the record
        </a>{" "}
        <span class="muted">{raw.data && !raw.data.whole ? "The beginning of it:" : ""}</span>
      </p>
      {raw.problem ? <Failure problem={raw.problem} retry={raw.reload} /> : null}
      {raw.data ? (
        <pre class="text mono" tabIndex={0} aria-label="The record as JSON">
          {visible(raw.data.whole ? indented(raw.data.text) : raw.data.text)}
        </pre>
      ) : (
        <Waiting slow={raw.slow} what="the record" />
      )}
    </div>
  );
}

/** Indent JSON, with lists of numbers on one line each. */
function indented(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2).replace(/\[[\s\d.,eE+-]+\]/g, (list) => list.replace(/\s+/g, " "));
  } catch {
    return text;
  }
}
