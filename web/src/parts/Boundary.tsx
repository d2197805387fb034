/** Catch a fault of a view, so that the rest of the page stays, and the reader learns of it. */

import { type ComponentChildren, Component, type JSX } from "preact";
import { CallError } from "../api/calls";
import { Failure } from "./feedback";

interface State {
  fault: string | null;
}

export class Boundary extends Component<{ children: ComponentChildren }, State> {
  override state: State = { fault: null };

  static override getDerivedStateFromError(error: unknown): State {
    return { fault: error instanceof Error ? error.message : String(error) };
  }

  override render({ children }: { children: ComponentChildren }, { fault }: State): ComponentChildren | JSX.Element {
    if (fault === null) return children;
    return <Failure problem={new CallError(-1, "PageError", fault)} retry={() => this.setState({ fault: null })} />;
  }
}
