/** The token under the pointer, or the chosen one, with its exact values. */

import type { JSX } from "preact";
import type { Brief, Tokens } from "../../api/types";
import { useResource } from "../../state/resource";
import { useServices } from "../../state/services";
import { count, probability } from "../../text/format";
import { shortened, visibleLine } from "../../text/visible";
import type { TokenStore } from "./tokenStore";
import type { TokenPlace } from "./TokensTab";

export interface TokenDetailProps {
  place: TokenPlace | null;
  /** Whether the reader has chosen the token: its exact log-probability is asked for. */
  pinned: boolean;
  store: TokenStore;
  brief: Brief;
  path: string;
  namespace: string;
}

export function TokenDetail({ place, pinned, store, brief, path, namespace }: TokenDetailProps): JSX.Element {
  const { calls } = useServices();
  const exactKey = place && pinned ? `exact ${path} ${place.segment} ${place.position}` : null;
  const exact = useResource<Tokens>(exactKey, (signal) =>
    calls.get(path, { namespace, segment: place?.segment, start: place?.position, limit: 1, exact: true, texts: false }, signal),
  );
  const index = place ? store.rows.find(place.segment, place.position) : -1;
  const chunk = store.chunks[index];
  const data = store.data(index);
  if (!place || !chunk || !data) return <p class="token-detail muted">Point at a token, or choose one with a click, for its id and values.</p>;
  const at = place.position - chunk.start;
  const sampled = data.mask[at] === 1;
  const exactValue = Array.isArray(exact.data?.logprobs) ? exact.data.logprobs[0] : undefined;
  const logprob = exactValue ?? data.logprobs[at] ?? NaN;
  const response = place.position - (brief.segments[place.segment]?.prompt ?? 0);
  const turn = brief.turns.findIndex((item) => item.segment === place.segment && response >= item.start && response < item.end);
  return (
    <dl class="token-detail facts" aria-live={pinned ? "polite" : "off"}>
      <Value name="Token id" value={String(data.ids[at] ?? "")} />
      <Value name="Text" value={JSON.stringify(shortened(data.texts[at] ?? "", 80))} mono />
      <Value name="Place" value={`segment ${place.segment + 1}, ${response < 0 ? `prompt ${count(place.position)}` : `response ${count(response)}`}`} />
      <Value name="Loss mask" value={sampled ? "1, sampled" : "0, not sampled"} />
      {sampled ? (
        <>
          <Value
            name="Log-probability"
            value={`${exactValue === undefined ? "≈ " : ""}${logprob.toPrecision(exactValue === undefined ? 3 : 8)} (${probability(logprob)})`}
          />
          <Value name="Policy version" value={data.versions[data.versionOf[at] ?? 0] || "–"} />
        </>
      ) : null}
      {turn >= 0 ? <Value name="Turn" value={count(turn + 1)} /> : null}
    </dl>
  );
}

function Value({ name, value, mono }: { name: string; value: string; mono?: boolean }): JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd class={mono ? "mono" : undefined}>{visibleLine(value)}</dd>
    </div>
  );
}
