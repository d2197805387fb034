/** Records leave out what has its default; here it is filled in, once, where an answer comes in. */

import type { Brief, StageTiming, Timings, Turn } from "./types";

const NO_TIME: StageTiming = { queued_seconds: 0, active_seconds: 0, attempts: 0 };

/** Return a brief with every field, from an answer of the control plane. */
export function filledBrief(answer: Partial<Brief>): Brief {
  const timings: Partial<Timings> = answer.timings ?? {};
  return {
    id: "",
    job: "",
    namespace: "default",
    task_id: "",
    sample_index: 0,
    status: "succeeded",
    reason: "",
    message: "",
    reward: null,
    reward_components: {},
    reward_reason: "",
    reward_output: "",
    sampling: null,
    attempts: [],
    attempts_dropped: 0,
    backend: "",
    tool_parser: "",
    truncated: false,
    truncated_reason: "",
    template_breaks: 0,
    metadata: {},
    spans: [],
    segments: [],
    messages: 0,
    conversation: 0,
    continues: null,
    neighbours: {},
    trace_id: null,
    ...answer,
    timings: {
      init: { ...NO_TIME, ...timings.init },
      run: { ...NO_TIME, ...timings.run },
      eval: { ...NO_TIME, ...timings.eval },
      model_seconds: timings.model_seconds ?? 0,
      tool_seconds: timings.tool_seconds ?? 0,
      own_seconds: timings.own_seconds ?? 0,
    },
    turns: filledTurns(answer.turns),
    branches: (answer.branches ?? []).map((branch) => ({
      ...branch,
      parent: branch.parent ?? null,
      shared: branch.shared ?? 0,
      messages: branch.messages ?? 0,
      turns: filledTurns(branch.turns),
    })),
    harness: answer.harness
      ? { ...answer.harness, seconds: answer.harness.seconds ?? 0, output: answer.harness.output ?? "", log: answer.harness.log ?? "" }
      : null,
  };
}

function filledTurns(turns: Partial<Turn>[] | undefined): Turn[] {
  return (turns ?? []).map((turn) => ({
    segment: 0,
    start: 0,
    end: 0,
    finish_reason: "stop",
    tool_calls: [],
    model_seconds: 0,
    tool_seconds: 0,
    ...turn,
  }));
}
