/** Numbers, durations and times in the reader's language. */

const whole = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const percentage = new Intl.NumberFormat(undefined, { style: "percent", maximumFractionDigits: 0 });
const probabilities = new Intl.NumberFormat(undefined, { style: "percent", maximumSignificantDigits: 3 });
const rewards = new Intl.NumberFormat(undefined, { maximumFractionDigits: 3 });
const moments = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clocks = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = new Intl.DateTimeFormat(undefined, { hour: "numeric", minute: "2-digit" });

/** Stands where there is no value. */
export const NOTHING = "–";

export function count(value: number | null | undefined): string {
  return value == null ? NOTHING : whole.format(value);
}

export function brief(value: number | null | undefined): string {
  return value == null ? NOTHING : compact.format(value);
}

export function percent(value: number | null | undefined): string {
  return value == null ? NOTHING : percentage.format(value);
}

/** A log-probability in nats as a probability with three digits. */
export function probability(logprob: number): string {
  return probabilities.format(Math.exp(logprob));
}

export function reward(value: number | null | undefined): string {
  return value == null ? NOTHING : rewards.format(value);
}

/** A reward in at most four characters, for a cell of the grid. */
export function tinyReward(value: number): string {
  if (Number.isInteger(value) && Math.abs(value) < 1000) return String(value);
  const text = value.toPrecision(2);
  return text.replace(/^(-?)0\./, "$1.").replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "").slice(0, 5);
}

/** Seconds in at most two units, as in 840 ms, 3.2 s, 4 min 10 s or 2 h 5 min. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null || !Number.isFinite(seconds)) return NOTHING;
  const size = Math.abs(seconds);
  const sign = seconds < 0 ? "−" : "";
  if (size === 0) return "0 s";
  if (size < 0.0005) return "<1 ms";
  if (size < 1) return `${sign}${whole.format(size * 1000)} ms`;
  if (size < 10) return `${sign}${(Math.round(size * 10) / 10).toLocaleString()} s`;
  if (size < 60) return `${sign}${Math.round(size)} s`;
  return `${sign}${twoUnits(Math.round(size))}`;
}

function twoUnits(seconds: number): string {
  const units: [number, string][] = [
    [86_400, "d"],
    [3_600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const first = units.findIndex(([size]) => seconds >= size);
  const [size, name] = units[first] ?? [1, "s"];
  const [next, nextName] = units[first + 1] ?? [1, "s"];
  const rest = Math.floor((seconds % size) / next);
  return rest ? `${Math.floor(seconds / size)} ${name} ${rest} ${nextName}` : `${Math.floor(seconds / size)} ${name}`;
}

/** How long ago a time was, by the server's clock. */
export function ago(time: number | null | undefined, now: number): string {
  if (time == null) return NOTHING;
  const seconds = now - time;
  return seconds < 1 ? "now" : `${duration(Math.floor(seconds))} ago`;
}

export function moment(time: number | null | undefined): string {
  return time == null ? NOTHING : moments.format(time * 1000);
}

export function hourAndMinute(time: number): string {
  return minutes.format(time * 1000);
}

/** A count with the name of what is counted, which has an s unless there is one. */
export function counted(value: number, name: string): string {
  return `${whole.format(value)} ${name}${value === 1 ? "" : "s"}`;
}

export function clock(time: number): string {
  return clocks.format(time * 1000);
}
