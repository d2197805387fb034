/**
 * Log-probabilities as the page gets and shows them.
 *
 * The control plane sends one byte a token: 0 where the loss mask is 0, and v from 1 to 255 for a
 * log-probability of about −(v − 1) / 20 nats, cut at −12.7.
 */

/** Nats that one step of the byte stands for. */
const STEP = 1 / 20;

/** The shades of the page, from the most probable tokens to the least; a shade ends at this many nats below zero. */
export const SHADE_ENDS: readonly number[] = [0.05, 0.35, 0.9, 1.8, 3.2, 5, Infinity];

/** Decode base64 into bytes. */
export function bytesOf(base64: string): Uint8Array {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Return log-probabilities in nats; NaN stands for none. */
export function logprobsOf(sent: string | readonly (number | null)[]): Float32Array {
  if (typeof sent !== "string") return Float32Array.from(sent, (value) => value ?? NaN);
  const bytes = bytesOf(sent);
  const values = new Float32Array(bytes.length);
  for (let i = 0; i < bytes.length; i += 1) values[i] = bytes[i] === 0 ? NaN : (1 - (bytes[i] ?? 1)) * STEP;
  return values;
}

/** Return the number of a log-probability's shade, or −1 for none. */
export function shadeOf(logprob: number): number {
  return Number.isNaN(logprob) ? -1 : SHADE_ENDS.findIndex((end) => -logprob < end);
}

/** The range of a shade in words, for the legend. */
export function shadeName(shade: number): string {
  const from = shade === 0 ? 0 : (SHADE_ENDS[shade - 1] ?? 0);
  const end = SHADE_ENDS[shade] ?? Infinity;
  const probable = (nats: number) => `${(100 * Math.exp(-nats)).toPrecision(2).replace(/\.0$/, "")} %`;
  return end === Infinity ? `less than ${probable(from)}` : `${probable(end)} to ${from === 0 ? "100 %" : probable(from)}`;
}
