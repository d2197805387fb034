/** What a reader without a session sees. */

import type { JSX } from "preact";
import { Command } from "../parts/feedback";

export function SignIn({ refused }: { refused: string | null }): JSX.Element {
  return (
    <main class="sign-in" id="content">
      <h1>
        <span class="brand-mark" aria-hidden="true" /> Rollyard
      </h1>
      {refused ? (
        <p class="failure" role="alert">
          {refused}
        </p>
      ) : null}
      <h2>Sign in from a terminal</h2>
      <p>This page has no passwords. A command that has your token makes a link that can be used once within a minute:</p>
      <Command>rollyard open</Command>
      <p>For a control plane on Kubernetes, the command forwards a port first:</p>
      <Command>rollyard --kubernetes open</Command>
      <p>If your session has ended, or its token was replaced, the same command signs you in again.</p>
      <button type="button" onClick={() => window.location.reload()}>
        Look again
      </button>
    </main>
  );
}
