/**
 * Where the reader is: the path names a view, and the query holds filters and selection.
 *
 * Everything here is pure. A segment of a path is percent-encoded, since a task's id may hold any character.
 */

export type Place =
  | { view: "overview" }
  | { view: "job"; namespace: string; name: string }
  | { view: "group"; namespace: string; name: string; task: string }
  | { view: "rollout"; namespace: string; name: string; id: string }
  | { view: "unknown"; path: string };

/** Read a path below the prefix. */
export function placeOf(path: string): Place {
  const parts = path.split("/").filter((part) => part !== "");
  const decoded = parts.map(decode);
  if (parts.length === 0) return { view: "overview" };
  if (decoded.some((part) => part === null)) return { view: "unknown", path };
  const [first, namespace = "", name = "", kind, id = ""] = decoded as string[];
  if (first !== "jobs") return { view: "unknown", path };
  if (parts.length === 3) return { view: "job", namespace, name };
  if (parts.length === 5 && kind === "groups") return { view: "group", namespace, name, task: id };
  if (parts.length === 5 && kind === "rollouts") return { view: "rollout", namespace, name, id };
  return { view: "unknown", path };
}

/** Write the path of a place, without the prefix. */
export function pathOf(place: Place): string {
  switch (place.view) {
    case "overview":
      return "/";
    case "unknown":
      return place.path;
    default: {
      const job = `/jobs/${encode(place.namespace)}/${encode(place.name)}`;
      if (place.view === "group") return `${job}/groups/${encode(place.task)}`;
      return place.view === "rollout" ? `${job}/rollouts/${encode(place.id)}` : job;
    }
  }
}

/** The prefix in front of the page's paths: it begins with a slash and does not end with one, or it is empty. */
export function cleanPrefix(prefix: string): string {
  const inner = prefix.replace(/^\/+|\/+$/g, "");
  return inner === "" ? "" : `/${inner}`;
}

/** Remove the prefix from a location's path. */
export function withoutPrefix(path: string, prefix: string): string {
  if (prefix !== "" && (path === prefix || path.startsWith(`${prefix}/`))) return path.slice(prefix.length) || "/";
  return path || "/";
}

/** Return the query with some values changed; null, false or an empty text removes one. Names are sorted. */
export function changedQuery(query: URLSearchParams, changes: Record<string, string | number | boolean | null>): URLSearchParams {
  const values = new Map(query.entries());
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "" || value === false) values.delete(name);
    else values.set(name, value === true ? "1" : String(value));
  }
  return new URLSearchParams([...values.entries()].sort(([a], [b]) => (a < b ? -1 : 1)));
}

/** A whole number of the query within bounds, or null. */
export function wholeOf(query: URLSearchParams, name: string, least: number, most: number): number | null {
  const text = query.get(name);
  if (text === null || !/^-?\d{1,15}$/.test(text)) return null;
  const value = Number(text);
  return value >= least && value <= most ? value : null;
}

/** One of some words of the query, or the first of them. */
export function wordOf<T extends string>(query: URLSearchParams, name: string, words: readonly [T, ...T[]]): T {
  const text = query.get(name);
  return words.find((word) => word === text) ?? words[0];
}

// A browser resolves segments of dots, also when they are percent-encoded, so these are encoded twice. A segment that
// really reads "%2E" is written with one more of its characters encoded, so that the two differ.
function encode(segment: string): string {
  if (segment === "." || segment === "..") return segment.replace(/\./g, "%252E");
  if (segment === "%2E" || segment === "%2E%2E") return segment.replace(/%2E/g, "%25%32E");
  return encodeURIComponent(segment);
}

function decode(segment: string): string | null {
  try {
    if (segment === "%252E" || segment === "%252E%252E") return segment.replace(/%252E/g, ".");
    return decodeURIComponent(segment);
  } catch {
    return null;
  }
}
