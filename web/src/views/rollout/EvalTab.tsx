/** What Eval saw and said: the reward, what it is made of, why, and what else the evaluation kept. */

import type { JSX } from "preact";
import type { Brief } from "../../api/types";
import { Empty } from "../../parts/feedback";
import { duration, reward } from "../../text/format";
import { visible, visibleLine } from "../../text/visible";

export function EvalTab({ brief }: { brief: Brief }): JSX.Element {
  const components = Object.entries(brief.reward_components);
  const metadata = Object.entries(brief.metadata);
  const evalAttempts = brief.attempts.filter((attempt) => attempt.stage === "eval");
  if (brief.reward === null && components.length === 0 && metadata.length === 0) {
    return (
      <Empty title="No evaluation gave a reward.">
        <p>
          {brief.status === "succeeded" ? "The job's handler gave none." : "The rollout ended before Eval had a result."} The timeline shows what
          happened.
        </p>
      </Empty>
    );
  }
  const most = Math.max(1e-9, ...components.map(([, value]) => Math.abs(value)));
  return (
    <div class="eval">
      <section class="panel" aria-labelledby="reward-title">
        <h2 id="reward-title">What Eval said</h2>
        <p class="verdict">
          reward <b>{reward(brief.reward)}</b>
          {brief.reward_reason ? (
            <>
              {" "}
              because of <b>{visibleLine(brief.reward_reason)}</b>
            </>
          ) : null}
          <span class="muted"> after {duration(brief.timings.eval.active_seconds)}</span>
        </p>
        {components.length ? (
          <table class="plain times">
            <thead>
              <tr>
                <th scope="col">Component</th>
                <th scope="col">Size</th>
                <th scope="col" class="number">
                  Value
                </th>
              </tr>
            </thead>
            <tbody>
              {components.map(([name, value]) => (
                <tr key={name}>
                  <th scope="row">{visibleLine(name)}</th>
                  <td>
                    <span class="timebar" aria-hidden="true">
                      <span class={value < 0 ? "fill-bad" : "fill-good"} style={{ width: `${(100 * Math.abs(value)) / most}%` }} />
                    </span>
                  </td>
                  <td class="number">{reward(value)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        ) : null}
        {evalAttempts.map((attempt, index) => (
          <p key={index} class="notice bad">
            <b>{visibleLine(attempt.reason)}</b> {visible(attempt.message)}
          </p>
        ))}
      </section>
      <section class="panel" aria-labelledby="saw-title">
        <h2 id="saw-title">What Eval saw and kept</h2>
        {brief.reward_output ? (
          <pre class="text mono output" tabIndex={0} aria-label="What the evaluation printed">
            {visible(brief.reward_output)}
          </pre>
        ) : (
          <p class="muted">The evaluation printed nothing.</p>
        )}
        <dl class="metadata">
          {metadata.map(([name, value]) => (
            <div key={name}>
              <dt>{visibleLine(name)}</dt>
              <dd class="text mono">{visible(typeof value === "string" ? value : JSON.stringify(value, null, 2))}</dd>
            </div>
          ))}
        </dl>
      </section>
      {brief.sampling ? (
        <section class="panel" aria-labelledby="sampling-title">
          <h2 id="sampling-title">How tokens were sampled</h2>
          <dl class="facts">
            {Object.entries(brief.sampling).map(([name, value]) => (
              <div key={name}>
                <dt>{visibleLine(name)}</dt>
                <dd>{visibleLine(String(value))}</dd>
              </div>
            ))}
          </dl>
        </section>
      ) : null}
    </div>
  );
}
