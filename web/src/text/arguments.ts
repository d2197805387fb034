/** The arguments of a tool call as a reader wants them: programs and texts with their line feeds. */

/** Arguments that are shown one by one; a call with more is shown as it was sent. */
const MOST_ARGUMENTS = 50;

/**
 * Return the arguments with one name a line. A text of several lines stands below its name. What is no JSON object,
 * as when it was cut or the model wrote something else, is returned as it is.
 */
export function argumentsText(sent: string): string {
  let parsed: unknown;
  try {
    parsed = JSON.parse(sent);
  } catch {
    return sent;
  }
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) return sent;
  const entries = Object.entries(parsed);
  if (entries.length === 0 || entries.length > MOST_ARGUMENTS) return sent;
  return entries.map(([name, value]) => `${JSON.stringify(name).slice(1, -1)}: ${valueText(value)}`).join("\n");
}

function valueText(value: unknown): string {
  if (typeof value !== "string") return JSON.stringify(value);
  return value.includes("\n") ? `\n${value.replace(/^/gm, "  ")}` : value;
}
