/** Links within the page: they change the history in the place of loading a document. */

import type { ComponentChildren, JSX } from "preact";
import { useServices } from "../state/services";

export interface LinkProps {
  href: string;
  children: ComponentChildren;
  class?: string;
  title?: string;
  label?: string;
  tabIndex?: number;
  data?: string;
}

export function Link(props: LinkProps): JSX.Element {
  const { router } = useServices();
  const follow = (event: MouseEvent) => {
    // A click with a modifier opens another tab or window, as everywhere.
    if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    router.go(props.href);
  };
  return (
    <a
      href={props.href}
      onClick={follow}
      class={props.class}
      title={props.title}
      aria-label={props.label}
      tabIndex={props.tabIndex}
      data-key={props.data}
    >
      {props.children}
    </a>
  );
}
