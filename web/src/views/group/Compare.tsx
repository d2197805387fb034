/** Two samples of a group: the first token that differs, with the tokens around it. */

import type { JSX } from "preact";
import { Calls } from "../../api/calls";
import type { Difference, DifferenceSide, RolloutRow } from "../../api/types";
import { Failure, Waiting } from "../../parts/feedback";
import { Choice } from "../../parts/fields";
import { Link } from "../../parts/Link";
import { useResource } from "../../state/resource";
import { useLocation, useServices } from "../../state/services";
import { count, reward } from "../../text/format";
import { drawn } from "../../tokens/lines";

export function Compare({ samples, namespace, name }: { samples: RolloutRow[]; namespace: string; name: string }): JSX.Element | null {
  const { router, calls } = useServices();
  const { query } = useLocation();
  const ended = samples.filter((sample) => sample.ended_at !== null);
  const rewarded = ended.filter((sample) => sample.reward !== null).sort((a, b) => (b.reward ?? 0) - (a.reward ?? 0));
  const best = rewarded[0] ?? ended[0];
  const worst = rewarded.length > 1 ? rewarded.at(-1) : ended.find((sample) => sample !== best);
  const left = ended.find((sample) => String(sample.sample) === query.get("left")) ?? best;
  const right = ended.find((sample) => String(sample.sample) === query.get("right")) ?? worst;
  const ready = left !== undefined && right !== undefined && left.id !== right.id;
  const difference = useResource<Difference>(ready ? `difference ${left.id} ${right.id}` : null, (signal) =>
    calls.get(`${Calls.job(name, "rollouts", left?.id ?? "", "difference")}`, { namespace, other: right?.id }, signal),
  );
  if (ended.length < 2) {
    return <p class="notice">Where samples part ways can be seen as soon as two of them have ended.</p>;
  }
  const choices = [...ended].sort((a, b) => a.sample - b.sample).map((sample) => [String(sample.sample), `#${sample.sample} (${reward(sample.reward)})`] as const);
  return (
    <section class="panel" aria-labelledby="compare-title">
      <div class="panel-head">
        <h2 id="compare-title">Where two samples part ways</h2>
        <Choice label="Left" value={String(left?.sample ?? "")} choices={choices} onChange={(value) => router.change({ left: value })} />
        <Choice label="Right" value={String(right?.sample ?? "")} choices={choices} onChange={(value) => router.change({ right: value })} />
      </div>
      {!ready ? <p class="muted">Choose two different samples.</p> : null}
      {difference.problem ? <Failure problem={difference.problem} retry={difference.reload} /> : null}
      {ready && !difference.data && !difference.problem ? <Waiting slow={difference.slow} what="the difference" /> : null}
      {difference.data && left && right ? <Parting difference={difference.data} left={left} right={right} namespace={namespace} name={name} /> : null}
    </section>
  );
}

interface PartingProps {
  difference: Difference;
  left: RolloutRow;
  right: RolloutRow;
  namespace: string;
  name: string;
}

function Parting({ difference, left, right, namespace, name }: PartingProps): JSX.Element {
  const { router } = useServices();
  const { position, segment } = difference;
  if (position === null || segment === null) {
    return <p>All their tokens are the same, as far as the shorter one reaches.</p>;
  }
  const link = (row: RolloutRow) => router.href({ view: "rollout", namespace, name, id: row.id }, { tab: "tokens", segment, token: position });
  return (
    <>
      <p>
        The first token that differs is token <b>{count(position)}</b> of segment {segment + 1}. Tokens around it:
      </p>
      <div class="parting">
        {(
          [
            [left, difference.left],
            [right, difference.right],
          ] as const
        ).map(([row, side]) => (
          <div key={row.id}>
            <h3>
              <Link href={link(row)}>Sample #{row.sample}</Link> <span class="muted">reward {reward(row.reward)}</span>
            </h3>
            <Side side={side} position={position} />
          </div>
        ))}
      </div>
    </>
  );
}

function Side({ side, position }: { side: DifferenceSide; position: number }): JSX.Element {
  const start = side.start ?? Math.max(0, position - 20);
  return (
    <p class="tokens-inline mono">
      {side.ids.map((id, index) => {
        const place = start + index;
        const text = side.texts ? drawn(side.texts[index] ?? "") : `${id} `;
        return place === position ? (
          <mark key={place} title={`token ${id}`}>
            {text}
            <span class="visually-hidden"> (first differing token, id {id})</span>
          </mark>
        ) : (
          <span key={place} class={place > position ? "" : "muted"} title={`token ${id}`}>
            {text}
          </span>
        );
      })}
      {side.ids.length + start <= position ? <mark>ends here</mark> : null}
    </p>
  );
}
