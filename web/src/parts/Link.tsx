/** Links within the page. `followLink` of the frame turns clicks on them into changes of the history. */

import type { ComponentChildren, JSX } from "preact";
import type { Router } from "../state/router";

export interface LinkProps {
  href: string;
  children: ComponentChildren;
  class?: string;
  title?: string;
  label?: string;
  tabIndex?: number;
  /** Whether it is the one of several that is shown. */
  current?: boolean;
  data?: string;
}

export function Link({ href, children, label, data, current, ...rest }: LinkProps): JSX.Element {
  return (
    <a href={href} aria-label={label} aria-current={current || undefined} data-key={data ?? "link"} {...rest}>
      {children}
    </a>
  );
}

/**
 * Follow a click on a link of the page without loading a document. One listener does so for all of them, since a
 * grid has thousands.
 */
export function followLink(event: MouseEvent, router: Router): void {
  const link = (event.target as HTMLElement | null)?.closest<HTMLAnchorElement>("a[data-key]");
  // A click with a modifier opens another tab or window, as everywhere.
  if (!link || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  router.go(link.getAttribute("href") ?? "/");
}
