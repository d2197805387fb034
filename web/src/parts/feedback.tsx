/** What stands in the place of data: a wait, a failure, or nothing yet. */

import type { ComponentChildren, JSX } from "preact";
import type { CallError } from "../api/calls";
import { visible } from "../text/visible";

/** A wait. It appears only after a moment, so that quick answers do not flicker. */
export function Waiting({ slow, what }: { slow: boolean; what: string }): JSX.Element {
  return (
    <div class="waiting" role="status">
      {slow ? (
        <>
          <span class="spinner" aria-hidden="true" /> Loading {what}…
        </>
      ) : null}
    </div>
  );
}

export function Failure({ problem, retry }: { problem: CallError; retry?: () => void }): JSX.Element {
  return (
    <div class="failure" role="alert">
      <p>
        <strong>{titleOf(problem)}</strong> {visible(problem.message)}
      </p>
      {retry ? (
        <button type="button" onClick={retry}>
          Try again
        </button>
      ) : null}
    </div>
  );
}

function titleOf(problem: CallError): string {
  if (problem.status === 0) return problem.reason === "Timeout" ? "No answer in time." : "No connection.";
  if (problem.status === 403) return "This session may not see that.";
  if (problem.status === 404) return "Not found.";
  if (problem.status === 429) return "Too many requests.";
  if (problem.status === 503 || problem.status === 504) return "The store answers slowly.";
  return problem.status < 0 ? "The page has a fault." : `Error ${problem.status}.`;
}

/** An empty list, with what the reader can do next. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="empty">
      <p>
        <strong>{title}</strong>
      </p>
      {children ? <div class="empty-next">{children}</div> : null}
    </div>
  );
}

/** A command that the reader can type in a terminal. */
export function Command({ children }: { children: string }): JSX.Element {
  return (
    <pre class="command" tabIndex={0} aria-label="Command">
      {children}
    </pre>
  );
}
