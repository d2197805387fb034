/** The browser's history as the page's state: every filter and selection is in the address. */

import { type Place, changedQuery, pathOf, placeOf, withoutPrefix } from "./place";

/** Addresses whose scroll positions are kept. */
const MOST_POSITIONS = 50;

export interface Location {
  place: Place;
  query: URLSearchParams;
}

export class Router {
  #listeners = new Set<() => void>();
  /** Scroll positions of lists, by address and the list's name. */
  readonly #positions = new Map<string, Map<string, number>>();
  current: Location;

  constructor(readonly prefix: string) {
    this.current = this.#read();
    window.addEventListener("popstate", () => this.#moved());
  }

  /** Return the address of a place. */
  href(place: Place, query?: Record<string, string | number | boolean | null>): string {
    // Most links have no query, and a grid makes thousands of links.
    if (query === undefined) return this.prefix + pathOf(place);
    const text = changedQuery(new URLSearchParams(), query).toString();
    return `${this.prefix}${pathOf(place)}${text ? `?${text}` : ""}`;
  }

  /** Go to an address of the page, as a new entry of the history. */
  go(href: string): void {
    window.history.pushState(null, "", href);
    this.#moved();
    window.scrollTo(0, 0);
  }

  /**
   * Change values of the query. A selection, as of a tab, is a new entry of the history; what changes with each
   * letter that is typed replaces the current one.
   */
  change(changes: Record<string, string | number | boolean | null>, replace = false): void {
    const query = changedQuery(this.current.query, changes).toString();
    const href = `${window.location.pathname}${query ? `?${query}` : ""}`;
    if (href === `${window.location.pathname}${window.location.search}`) return;
    if (replace) window.history.replaceState(null, "", href);
    else window.history.pushState(null, "", href);
    this.#moved();
  }

  /** The scroll positions at the present address. Only those of some addresses are kept. */
  positions(): Map<string, number> {
    const address = window.location.pathname + window.location.search;
    const known = this.#positions.get(address) ?? new Map<string, number>();
    this.#positions.delete(address);
    this.#positions.set(address, known);
    const [oldest] = this.#positions.keys();
    if (this.#positions.size > MOST_POSITIONS && oldest !== undefined) this.#positions.delete(oldest);
    return known;
  }

  listen(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  #read(): Location {
    return {
      place: placeOf(withoutPrefix(window.location.pathname, this.prefix)),
      query: new URLSearchParams(window.location.search),
    };
  }

  #moved(): void {
    this.current = this.#read();
    for (const listener of this.#listeners) listener();
  }
}
