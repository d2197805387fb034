"""The record of a rollout of a harness: its own conversation, one that it has rewritten, and three others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OWN = 4
"""The number of the own conversation, which continues conversation 0."""
TRAINED = [0, 1, 4]
"""The segments that have tokens to train on. Each conversation has the segment of its own number."""


def _segment(prompt: Sequence[int], *turns: Sequence[int], trained: bool = True) -> dict[str, Any]:
    """Return a segment in which text from outside, which is the token 9, follows each turn but the last."""
    ids: list[int] = []
    mask: list[int] = []
    for number, turn in enumerate(turns):
        if number:
            ids, mask = [*ids, 9], [*mask, 0]
        ids += turn
        mask += [int(trained)] * len(turn)
    return {
        "prompt_ids": [*prompt],
        "response_ids": ids,
        "loss_mask": mask,
        "logprobs": [-0.25 * one for one in mask],
        "policy_versions": ["v1" if one else "" for one in mask],
    }


def _turn(segment: int, start: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"segment": segment, "start": start, "end": end, "finish_reason": "stop"} | fields


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def harness_record(**fields: Any) -> dict[str, Any]:
    """Return the record with its segments, as a worker's tests give it to `reported`.

    Conversation 0 is another version of the main one, with two turns; 1 is that of a sub-agent, which turn 1
    of it began; 2 are calls of the policy itself and 3 is a title, both untrained; 4 is the own one, which
    shares the first turn's text with 0. In all, 12 tokens can be trained on.
    """
    beginning = [_said("system", "Fix bugs."), _said("user", "Fix add.")]
    calls = [{"name": "bash", "arguments": {"command": "ls"}, "seconds": 0.5}]
    asked = {"temperature": 1, "max_tokens": 32000}
    return {
        "id": "r",
        "job": "job",
        "task_id": "t",
        "group_id": "t",
        "sample_index": 0,
        "messages": [*beginning, _said("user", "(summary) ls was run."), _said("assistant", "It is fixed.")],
        "turns": [_turn(4, 0, 3, asked=asked, model_seconds=0.25)],
        "conversation": OWN,
        "continues": 0,
        "branches": [
            {
                "number": 0,
                "kind": "main",
                "trained": True,
                "messages": [
                    *beginning,
                    _said("assistant", "I look around."),
                    _said("tool", "add.py"),
                    _said("assistant", "I ask a helper."),
                ],
                "turns": [
                    _turn(0, 0, 3, asked=asked, tool_calls=calls, finish_reason="tool_calls"),
                    _turn(0, 4, 6, asked=asked),
                ],
            },
            {
                "number": 1,
                "kind": "subagent",
                "trained": True,
                "parent": 0,
                "messages": [_said("user", "Read add.py."), _said("assistant", "It subtracts.")],
                "turns": [_turn(1, 0, 4)],
            },
            {
                "number": 2,
                "kind": "policy",
                "trained": False,
                "messages": [_said("user", "Say that I passed."), _said("assistant", "You passed.")],
                "turns": [_turn(2, 0, 2)],
            },
            {
                "number": 3,
                "kind": "title",
                "trained": False,
                "parent": 0,
                "shared": 2,
                "messages": [_said("user", "Name this."), _said("assistant", "Fixing add")],
                "turns": [_turn(3, 0, 2)],
            },
        ],
        "harness": {
            "name": "mini-swe-agent",
            "exit_code": 0,
            "seconds": 12.5,
            "output": "\x1b[31mstep 1\x1b[0m\n",
            "log": "started\n",
        },
        "segments": [
            _segment([1, 2, 3], [10, 11, 12], [13, 14]),
            _segment([1, 4], [20, 21, 22, 23]),
            _segment([1, 5], [30, 31], trained=False),
            _segment([1, 2, 3, 6], [40, 41], trained=False),
            _segment([1, 2, 3, 7, 8], [50, 51, 52]),
        ],
    } | fields


GATEWAY = {
    "calls": {"openai-chat": 4, "anthropic-messages": 2, "telepathy": 1},
    "refused": 1,
    "repeats": 2,
    "conversations": {"main": 2, "subagent": 1, "policy": 1, "title": 1},
    "segments": 0,
    "unmatched": 1,
    "tokenized": 17,
}
"""What the gateway counted in that rollout. No gateway speaks the last protocol."""
