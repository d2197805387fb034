/** The frame around every view: where one is, whether the page is live, and what it can do. */

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { LiveState } from "../api/live";
import { useKeys } from "../state/keys";
import { pathOf } from "../state/place";
import { useLocation, useServices } from "../state/services";
import { type Theme, applyTheme, nextTheme, savedTheme } from "../state/theme";
import { shortened, visibleLine } from "../text/visible";
import { KeysHelp } from "./dialogs";
import { Link, followLink } from "./Link";

const STATES: Record<LiveState, string> = {
  connecting: "Connecting…",
  open: "Live",
  reconnecting: "Reconnecting…",
  resting: "Paused",
};

export function Shell({ children }: { children: ComponentChildren }): JSX.Element {
  const services = useServices();
  const { router, live } = services;
  const [help, setHelp] = useState(false);
  const [theme, setTheme] = useState<Theme>(savedTheme());
  const [state, setState] = useState(live.state);
  useEffect(() => live.onState(setState), [live]);
  useEffect(() => applyTheme(theme), [theme]);
  useEffect(() => {
    const clicked = (event: MouseEvent) => followLink(event, router);
    document.addEventListener("click", clicked);
    return () => document.removeEventListener("click", clicked);
  }, [router]);
  const { place } = useLocation();
  const path = pathOf(place);
  const before = useRef(path);
  useEffect(() => {
    if (before.current === path) return;
    before.current = path;
    // Another view is read from its beginning, also by who does not see it.
    document.getElementById("content")?.focus({ preventScroll: true });
  }, [path]);
  useKeys({
    "?": () => setHelp(true),
    d: () => setTheme(nextTheme(theme)),
    g: () => router.go(router.href({ view: "overview" })),
    "/": () => document.querySelector<HTMLInputElement>("input[type=search]")?.focus(),
  });
  return (
    <>
      <a class="skip" href="#content">
        Skip to the content
      </a>
      <header class="top">
        <Link href={router.href({ view: "overview" })} class="brand" label="Rollyard, overview">
          <span class="brand-mark" aria-hidden="true" />
          Rollyard
        </Link>
        <Crumbs />
        <span class={`live live-${state}`} role="status">
          <span class="live-dot" aria-hidden="true" />
          {STATES[state]}
        </span>
        <button type="button" class="quiet" onClick={() => setTheme(nextTheme(theme))} title="Change the theme (d)">
          Theme: {theme}
        </button>
        <button type="button" class="quiet" onClick={() => setHelp(true)} title="Keys (?)" aria-label="Keys">
          ?
        </button>
        {services.session ? <SignOut /> : null}
      </header>
      {state === "reconnecting" ? (
        <div class="banner" role="alert">
          Reconnecting… The control plane does not answer. What is shown may be old.
        </div>
      ) : null}
      <main id="content" tabIndex={-1}>
        {children}
      </main>
      {help ? <KeysHelp onClose={() => setHelp(false)} /> : null}
    </>
  );
}

function SignOut(): JSX.Element {
  const { calls, session } = useServices();
  const leave = () => {
    void calls
      .delete("/session")
      .catch(() => undefined)
      .then(() => window.location.reload());
  };
  return (
    <button type="button" class="quiet" onClick={leave} title={`Signed in as ${session?.role ?? "viewer"}`}>
      Sign out
    </button>
  );
}

function Crumbs(): JSX.Element {
  const { router } = useServices();
  const { place } = useLocation();
  const steps: { name: string; href: string }[] = [];
  if (place.view === "job" || place.view === "group" || place.view === "rollout") {
    const { namespace, name } = place;
    steps.push({ name: namespace === "default" ? name : `${namespace}/${name}`, href: router.href({ view: "job", namespace, name }) });
    if (place.view === "group") steps.push({ name: `group ${place.task}`, href: router.href(place) });
    if (place.view === "rollout") steps.push({ name: `rollout ${place.id}`, href: router.href(place) });
  }
  return (
    <nav class="crumbs" aria-label="Where you are">
      <ol>
        {steps.map((step, index) => (
          <li key={step.href}>
            {index === steps.length - 1 ? (
              <span aria-current="page" title={visibleLine(step.name)}>
                {visibleLine(shortened(step.name, 60))}
              </span>
            ) : (
              <Link href={step.href}>{visibleLine(shortened(step.name, 60))}</Link>
            )}
          </li>
        ))}
      </ol>
    </nav>
  );
}
