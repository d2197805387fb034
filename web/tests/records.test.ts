import assert from "node:assert/strict";
import { test } from "node:test";
import { filledBrief } from "../src/api/records";

test("a record that leaves out its defaults has every field afterwards", () => {
  const brief = filledBrief({ id: "r", turns: [{ segment: 0, start: 0, end: 3 } as never], timings: { run: { active_seconds: 2 } } as never });
  assert.deepEqual([brief.attempts, brief.reward, brief.neighbours, brief.segments], [[], null, {}, []]);
  assert.deepEqual(brief.timings.run, { queued_seconds: 0, active_seconds: 2, attempts: 0 });
  assert.equal(brief.timings.model_seconds, 0);
  assert.deepEqual(brief.turns[0]?.tool_calls, []);
  assert.deepEqual([brief.conversation, brief.continues, brief.branches, brief.harness], [0, null, [], null]);
  const harness = filledBrief({ branches: [{ number: 1, kind: "title", trained: false } as never], harness: { name: "h", exit_code: null } as never });
  assert.deepEqual(harness.branches, [{ number: 1, kind: "title", trained: false, parent: null, shared: 0, messages: 0, turns: [] }]);
  assert.deepEqual(harness.harness, { name: "h", exit_code: null, seconds: 0, output: "", log: "" });
});
