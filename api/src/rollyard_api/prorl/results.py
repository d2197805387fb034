"""A trajectory in the form in which ProRL Agent answers `/process`. It is pure.

Token ids are arranged so that both readings of the form give the exact sequence: the `token_ids` of all
messages one after the other are the ids of the segment, and the `input_ids` of an assistant's message are the
ids that its request had as a prompt. Ids between two assistant's messages, which the chat template and the
tools made, belong to the message before the later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rollyard_crds.trajectory import turns_said

MAX_INPUT_IDS: Final = 4_000_000
"""The largest number of `input_ids` in one answer. Beyond it, only the last assistant's message has them."""
_TIMEOUTS: Final = ("Timeout", "DeadlineExceeded", "LeaseExpired")

Json = dict[str, Any]


def result(trajectory: Mapping[str, Any], *, names: Mapping[str, Any], tools: Sequence[str]) -> Json:
    """Return the body of the answer to `/process`.

    Args:
        trajectory: The record of the rollout.
        names: What the client named the row and the sample.
        tools: The names of the tools that the job's agent has.
    """
    scored = trajectory["status"] == "succeeded" and trajectory["reward"] is not None
    truncated = bool(trajectory.get("truncated"))
    turns = trajectory["turns"]
    body: Json = {
        **names,
        "git_patch": None,
        "success": scored,
        "error": None if scored else _error(trajectory),
        "finish": scored and not truncated,
        "messages": messages_with_ids(trajectory),
        "tools": [{"type": "function", "function": {"name": name}} for name in tools],
        "end_properly": bool(turns) and not truncated and turns[-1]["finish_reason"] != "length",
        "resolved": scored and trajectory["reward"] >= 1.0,
        "critical_error": None if scored else _critical(trajectory),
        "filter": not scored,
        "timing": _timing(trajectory),
        # The rest is ours.
        "reward": trajectory["reward"],
        "rollout": trajectory["id"],
        "truncated_reason": trajectory.get("truncated_reason", ""),
    }
    if len(trajectory["segments"]) > 1:
        body["segments"] = trajectory["segments"]
    if not scored:
        body["traceback"] = trajectory.get("message", "")
    return body


def _error(trajectory: Mapping[str, Any]) -> str:
    reason = trajectory.get("reason") or trajectory["status"].capitalize()
    message = trajectory.get("message", "")
    return f"{reason}: {message}" if message else str(reason)


def _critical(trajectory: Mapping[str, Any]) -> str:
    """Return the stage in which a rollout without a reward ended, or `timeout`."""
    if any(word in trajectory.get("reason", "") for word in _TIMEOUTS):
        return "timeout"
    attempts = trajectory.get("attempts") or []
    if attempts:
        return str(attempts[-1]["stage"])
    if trajectory["turns"]:
        return "eval"
    return "run" if trajectory["timings"]["init"]["active_seconds"] > 0 else "init"


def _timing(trajectory: Mapping[str, Any]) -> Json:
    timings = trajectory["timings"]
    spent = {stage: timings[stage]["active_seconds"] for stage in ("init", "run", "eval")}
    return {
        "init_time": spent["init"],
        "run_time": spent["run"],
        "eval_time": spent["eval"],
        "others_time": sum(timings[stage]["queued_seconds"] for stage in spent),
        "counted_elapsed": sum(spent.values()),
        "timeout_triggered": trajectory.get("truncated_reason") == "RunTimeout"
        or any(word in trajectory.get("reason", "") for word in _TIMEOUTS),
    }


def messages_with_ids(trajectory: Mapping[str, Any]) -> list[Json]:
    """Return the messages with token ids and log-probabilities.

    Of a rollout with several segments, where the chat template rewrote history, the messages have the ids of
    the last segment only, so that they are one sequence and no sampled token comes twice.
    """
    messages = [_plain(message) for message in trajectory["messages"]]
    turns = trajectory["turns"]
    said = turns_said([message["role"] for message in messages], len(turns))
    spans = {place: turns[no] for place, no in said.items() if turns[no]["end"] > turns[no]["start"]}
    segments = trajectory["segments"]
    if not segments or not spans:
        return messages
    last = max(turn["segment"] for turn in spans.values())
    segment = segments[last]
    ids = segment["prompt_ids"] + segment["response_ids"]
    begins = len(segment["prompt_ids"])
    chosen = {place: turn for place, turn in spans.items() if turn["segment"] == last}
    whole = sum(begins + turn["start"] for turn in chosen.values()) <= MAX_INPUT_IDS
    made: list[Json] = []
    reached = 0
    for place, message in enumerate(messages):
        turn = chosen.get(place)
        if turn is not None:
            start, end = turn["start"], turn["end"]
            outside = ids[reached : begins + start]
            if outside:
                _hold(made, outside)
            message["token_ids"] = segment["response_ids"][start:end]
            message["logprobs"] = segment["logprobs"][start:end]
            if whole or place == max(chosen):
                message["input_ids"] = ids[: begins + start]
            reached = begins + end
        made.append(message)
    return made


def _plain(message: Mapping[str, Any]) -> Json:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "role": message["role"],
        "content": message.get("content", ""),
        "tool_calls": [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls],
        "token_ids": [],
        "input_ids": [],
        "logprobs": [],
    }


def _hold(made: list[Json], outside: list[int]) -> None:
    """Give ids that were not sampled to the message before, or to an empty one if that is an assistant's."""
    if not made or made[-1]["role"] == "assistant":
        made.append(_plain({"role": "system", "content": ""}))
    made[-1]["token_ids"] = outside
    made[-1]["logprobs"] = [0.0] * len(outside)
