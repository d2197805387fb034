/** Calls to the control plane that served the page. The session is a cookie, which the browser sends by itself. */

import type { ServerClock } from "./clock";

/** Milliseconds after which a call is given up. */
const TIMEOUT = 30_000;
/** The largest number of characters of a raw answer that is kept; the rest of it is not read. */
const MOST_RAW = 262_144;

export type Params = Record<string, string | number | boolean | null | undefined>;

/** A call that brought no answer, or an answer that says what went wrong. */
export class CallError extends Error {
  constructor(
    /** The HTTP status; 0 where no answer came. */
    readonly status: number,
    /** A stable word, as in the problem's `reason`. */
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }

  /** Whether the same call may succeed later. */
  get passing(): boolean {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

export class Calls {
  constructor(
    readonly prefix: string,
    private readonly clock: ServerClock,
    /** Called when the control plane does not know the session. */
    private readonly onSignedOut: () => void,
  ) {}

  /** Return the address of a call on the server that served the page. */
  address(path: string, params: Params = {}): string {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(params)) {
      if (value !== null && value !== undefined && value !== "" && value !== false) query.set(name, String(value));
    }
    const text = query.toString();
    return `${this.prefix}/v1${path}${text ? `?${text}` : ""}`;
  }

  /** Return the path of a job's call; each part is percent-encoded. */
  static job(name: string, ...rest: (string | number)[]): string {
    return ["/rolloutjobs", ...[name, ...rest].map((part) => encodeURIComponent(String(part)))].join("/");
  }

  /** Ask for JSON. Raises `CallError`, or the signal's reason where the caller gave up. */
  async get<T>(path: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
    const answer = await this.#send("GET", this.address(path, params), undefined, signal);
    return (await this.#read(answer.json() as Promise<unknown>, signal)) as T;
  }

  /** Ask for the beginning of an answer's text, and say whether that is all of it. */
  async start(path: string, params: Params, signal?: AbortSignal): Promise<{ text: string; whole: boolean }> {
    const answer = await this.#send("GET", this.address(path, params), undefined, signal);
    const reader = answer.body?.getReader();
    if (!reader) return { text: "", whole: true };
    const decoder = new TextDecoder();
    let text = "";
    while (text.length < MOST_RAW) {
      const { done, value } = await this.#read(reader.read(), signal);
      if (done) return { text: text + decoder.decode(), whole: true };
      text += decoder.decode(value, { stream: true });
    }
    await reader.cancel();
    return { text: text.slice(0, MOST_RAW), whole: false };
  }

  /** Change something. The header shows that this page asks, and no form of another site. */
  async post(path: string, params: Params = {}, body?: unknown): Promise<void> {
    await this.#send("POST", this.address(path, params), body === undefined ? undefined : JSON.stringify(body));
  }

  async delete(path: string): Promise<void> {
    await this.#send("DELETE", this.address(path));
  }

  async #send(method: string, address: string, body?: string, signal?: AbortSignal): Promise<Response> {
    const limit = AbortSignal.timeout(TIMEOUT);
    const headers: Record<string, string> = { Accept: "application/json" };
    if (method !== "GET") headers["Rollyard-Page"] = "1";
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const options: RequestInit = {
      method,
      headers,
      credentials: "same-origin",
      redirect: "error",
      cache: "no-store",
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    };
    if (body !== undefined) options.body = body;
    const answer = await this.#read(fetch(address, options), signal);
    this.clock.heardDate(answer.headers.get("Date"));
    if (answer.ok) return answer;
    if (answer.status === 401) this.onSignedOut();
    throw await problemOf(answer);
  }

  async #read<T>(reading: Promise<T>, signal?: AbortSignal): Promise<T> {
    try {
      return await reading;
    } catch (error) {
      if (signal?.aborted) throw error;
      if (error instanceof DOMException && error.name === "TimeoutError") {
        throw new CallError(0, "Timeout", `The control plane did not answer within ${TIMEOUT / 1000} seconds.`);
      }
      throw new CallError(0, "Unreachable", "The control plane cannot be reached.");
    }
  }
}

async function problemOf(answer: Response): Promise<CallError> {
  let reason = "";
  let detail = "";
  try {
    const body = (await answer.json()) as { type?: unknown; reason?: unknown; title?: unknown; detail?: unknown };
    reason = String(body.reason ?? body.title ?? String(body.type ?? "").split("/").at(-1) ?? "");
    detail = String(body.detail ?? "");
  } catch {
    // The answer is not a problem in JSON, as when a proxy on the way made it. Its status says enough.
  }
  return new CallError(answer.status, reason, detail || `The control plane answered with status ${answer.status}.`);
}
