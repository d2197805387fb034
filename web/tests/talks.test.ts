import assert from "node:assert/strict";
import { test } from "node:test";
import { filledBrief } from "../src/api/records";
import type { Brief } from "../src/api/types";
import { leftAt, segmentNames, talkName, talksOf } from "../src/views/rollout/talks";

function turn(segment: number): never {
  return { segment, start: 0, end: 2 } as never;
}

function rewritten(changes: Partial<Brief> = {}): Brief {
  return filledBrief({
    conversation: 3, continues: 0, messages: 4, turns: [turn(3)],
    segments: [0, 1, 2, 3].map((i) => ({ prompt: 1, response: 2, sampled: i === 2 ? 0 : 2 })),
    branches: [
      { number: 0, kind: "main", trained: true, parent: null, shared: 0, messages: 6, turns: [turn(0)] },
      { number: 1, kind: "subagent", trained: true, parent: 0, shared: 4, messages: 5, turns: [turn(1)] },
      { number: 2, kind: "title", trained: false, parent: 1, shared: 3, messages: 2, turns: [turn(2)] },
    ],
    ...changes,
  });
}

test("the own conversation comes first, and says whether its tokens are trained on", () => {
  const talks = talksOf(rewritten());
  assert.deepEqual(talks.map((talk) => [talk.number, talk.own, talk.trained]), [[3, true, true], [0, false, true], [1, false, true], [2, false, false]]);
  const untrained = talksOf(rewritten({ segments: [0, 1, 2, 3].map(() => ({ prompt: 1, response: 2, sampled: 0 })) }));
  assert.equal(untrained[0]?.trained, false);
  assert.deepEqual(talksOf(filledBrief({ messages: 2 })).map((talk) => [talk.number, talk.messages]), [[0, 2]]);
});

test("a conversation left at a message of the conversation that has it", () => {
  const talks = talksOf(rewritten());
  const places = talks.map((talk) => leftAt(talks, talk));
  assert.deepEqual(places[0], { number: 0, message: null }, "the own one rewrites the whole of it");
  assert.equal(places[1], null);
  assert.deepEqual(places[2], { number: 0, message: 3 });
  assert.deepEqual(places[3], { number: 0, message: 2 }, "its parent had not yet left that one");
  const [own, ...rest] = talksOf(rewritten({ branches: [{ number: 4, kind: "other", trained: false, parent: 3, shared: 4, messages: 1, turns: [] }] }));
  assert.deepEqual(leftAt([own!, ...rest], rest[0]!), { number: 3, message: 3 });
  const lost = talksOf(rewritten({ branches: [{ number: 1, kind: "other", trained: false, parent: 0, shared: 2, messages: 1, turns: [] }] }));
  assert.deepEqual(leftAt(lost, lost[1]!), { number: 0, message: null }, "a parent that is not there is named");
});

test("segments are named where there are several conversations", () => {
  assert.deepEqual(segmentNames(rewritten()), [
    "conversation 0: another version of the main conversation", "conversation 1: sub-agent",
    "conversation 2: title, not trained on", "conversation 3: own conversation",
  ]);
  assert.deepEqual(segmentNames(rewritten({ branches: [] })), [null, null, null, null]);
  assert.equal(talkName({ ...talksOf(rewritten())[1]!, kind: "novel" }), "0: novel");
});
