"""Requests of workers are checked here: small bodies by pydantic, and large trajectories by hand.

The token lists of a trajectory are checked for type, length and mask with operations that run at the speed of
C. They are kept in the form in which they arrive, instead of being converted to models and back.
"""

from __future__ import annotations

import re
from itertools import compress
from operator import not_
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from rollyard_crds.lease import MAX_BATCH, RunStats, SandboxHandle, StageFailure, StageTimes
from rollyard_crds.reading.manifest import describe
from rollyard_crds.trajectory import LOWEST_LOGPROB, MALFORMED_CALL, MAX_REWARD, MAX_REWARD_OUTPUT, Trajectory

from rollyard_api.core.codec import check_plain, dumps, pack
from rollyard_api.core.problems import Invalid
from rollyard_api.core.validation import MAX_PROBLEMS
from rollyard_api.machine import events
from rollyard_api.trajectories.traces import MAX_REASON

MAX_CARRY_BYTES = 1 << 20
_FAILURES = TypeAdapter(list[StageFailure])
_PARALLEL = ("loss_mask", "logprobs", "policy_versions")
_RESULT_FIELDS = frozenset(
    {
        "rollout",
        "token",
        "stage",
        "sandbox",
        "carry",
        "trajectory",
        "reward",
        "reward_components",
        "reward_reason",
        "reward_output",
        "stats",
        "times",
    }
)
_REWARD = f"a finite number from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}"
_REASON = re.compile(r"([A-Z][A-Za-z0-9]{0,127})?")
_SEGMENT_FIELDS = frozenset({"prompt_ids", "response_ids", *_PARALLEL})


def _object(document: Any, name: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise Invalid(
            f"{name}: must be an object, not {type(document).__name__}", errors=[f"{name}: not an object"]
        )
    return document


def _items(document: Any, name: str) -> list[Any]:
    body = _object(document, "body")
    items = body.get(name)
    problems = [f"{key}: unknown field" for key in body.keys() - {"worker", name}]
    if not isinstance(body.get("worker"), str) or not body["worker"]:
        problems.append("worker: must be a string of 1 to 253 characters")
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_BATCH:
        problems.append(f"{name}: must be a list of 1 to {MAX_BATCH} items")
    if problems:
        raise Invalid(problems[0], errors=problems)
    assert isinstance(items, list)
    return items


def check_results(document: Any) -> list[dict[str, Any]]:
    """Return the checked results of a CompleteRequest, with the trajectory of a Run packed under "packed".

    Raises:
        Invalid: A result is wrong. None of the results is accepted in this case.
    """
    problems: list[str] = []
    results = _items(document, "results")
    check_plain([_without_segments(item) for item in results])
    for place, item in enumerate(results):
        name = f"results[{place}]"
        problems += _result_problems(item, name)
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise Invalid(problems[0], errors=problems[:MAX_PROBLEMS])
    for item in results:
        if item["stage"] == "run":
            trajectory = item["trajectory"]
            item["packed"] = pack(dumps(trajectory))
    return results


def _without_segments(item: Any) -> Any:
    """Return a result without its token lists, which are large and whose entries are checked elsewhere."""
    trajectory = item.get("trajectory") if isinstance(item, dict) else None
    if not isinstance(trajectory, dict):
        return item
    return item | {"trajectory": trajectory | {"segments": []}}


def _result_problems(item: Any, name: str) -> list[str]:
    if not isinstance(item, dict):
        return [f"{name}: must be an object"]
    problems = [f"{name}.{key}: unknown field" for key in sorted(item.keys() - _RESULT_FIELDS, key=str)]
    if not isinstance(item.get("rollout"), str):
        problems.append(f"{name}.rollout: must be a string")
    if type(item.get("token")) is not int:
        problems.append(f"{name}.token: must be an integer")
    stage = item.get("stage")
    if stage not in ("init", "run", "eval"):
        problems.append(f"{name}.stage: must be one of init, run, eval (got {stage!r})")
    carry = item.get("carry")
    if carry is not None and not isinstance(carry, dict):
        problems.append(f"{name}.carry: must be an object")
    elif carry and len(dumps(carry)) > MAX_CARRY_BYTES:
        problems.append(f"{name}.carry: is longer than {MAX_CARRY_BYTES} bytes")
    problems += _model_problems(SandboxHandle, item.get("sandbox"), f"{name}.sandbox")
    problems += _model_problems(StageTimes, item.get("times"), f"{name}.times")
    problems += _model_problems(RunStats, item.get("stats"), f"{name}.stats")
    if stage == "run":
        problems += trajectory_problems(item.get("trajectory"), f"{name}.trajectory")
    elif item.get("trajectory") is not None:
        problems.append(f"{name}.trajectory: only the Run stage gives one")
    if stage == "eval":
        problems += _reward_problems(item, name)
    else:
        problems += [
            f"{name}.{field}: only the Eval stage gives one"
            for field in ("reward", "reward_reason", "reward_output")
            if item.get(field) not in (None, "")
        ]
    return problems


def _reward_problems(item: dict[str, Any], name: str) -> list[str]:
    """Return the problems of the reward of an Eval."""
    problems = []
    reward, components, reason = item.get("reward"), item.get("reward_components"), item.get("reward_reason")
    if not _is_reward(reward):
        problems.append(f"{name}.reward: must be {_REWARD} in stage eval (got {_shown(reward)})")
    if components is not None and not isinstance(components, dict):
        problems.append(f"{name}.reward_components: must be an object of numbers")
    elif components:
        problems += [
            f"{name}.reward_components.{str(key)[:64]}: must be {_REWARD} (got {_shown(value)})"
            for key, value in components.items()
            if not _is_reward(value)
        ][:MAX_PROBLEMS]
    if reason is not None and not (isinstance(reason, str) and _REASON.fullmatch(reason)):
        problems.append(
            f"{name}.reward_reason: must be one CamelCase word of at most 128 characters, or empty "
            f"(got {_shown(reason)})"
        )
    output = item.get("reward_output")
    if output is not None and not (isinstance(output, str) and len(output) <= MAX_REWARD_OUTPUT):
        problems.append(f"{name}.reward_output: must be a text of at most {MAX_REWARD_OUTPUT} characters")
    return problems


def _model_problems(kind: type[BaseModel], value: Any, name: str) -> list[str]:
    if value is None:
        return []
    try:
        kind.model_validate(value)
    except ValidationError as error:
        return describe(error, name)
    return []


def _is_reward(value: Any) -> bool:
    # A comparison with NaN is false, and values that are not finite are therefore refused here, too.
    return type(value) in (int, float) and -MAX_REWARD <= value <= MAX_REWARD


def _shown(value: Any) -> str:
    """Return the text of a wrong value for a message, shortened to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def trajectory_problems(document: Any, name: str) -> list[str]:
    """Return the problems of a trajectory that Run sends, or [] if there are none.

    The token lists are checked here, and everything else is checked by the Trajectory model without them.
    """
    if not isinstance(document, dict):
        return [f"{name}: is required in stage run and must be an object"]
    segments = document.get("segments", [])
    if not isinstance(segments, list):
        return [f"{name}.segments: must be a list"]
    problems: list[str] = []
    for place, segment in enumerate(segments):
        problems += _segment_problems(segment, f"{name}.segments[{place}]")
    if not problems:
        problems = _model_problems(Trajectory, document | {"segments": []}, name)
    if not problems:
        problems = _turn_problems(document.get("turns", []), segments, name)
    return problems


def _segment_problems(segment: Any, name: str) -> list[str]:
    if not isinstance(segment, dict):
        return [f"{name}: must be an object"]
    if segment.keys() != _SEGMENT_FIELDS:
        wrong = sorted(segment.keys() ^ _SEGMENT_FIELDS)
        return [
            f"{name}: must have exactly {', '.join(sorted(_SEGMENT_FIELDS))}; missing or unknown: {wrong}"
        ]
    for key, values in segment.items():
        if not isinstance(values, list):
            return [f"{name}.{key}: must be a list"]
    n = len(segment["response_ids"])
    for key in _PARALLEL:
        if len(segment[key]) != n:
            return [f"{name}.{key} has {len(segment[key])} entries, response_ids has {n}"]
    mask, logprobs = segment["loss_mask"], segment["logprobs"]
    for key, allowed in (("prompt_ids", {int}), ("response_ids", {int}), ("loss_mask", {int}),
                         ("logprobs", {float, int}), ("policy_versions", {str})):  # fmt: skip
        if not set(map(type, segment[key])) <= allowed:
            kinds = " or ".join(sorted(t.__name__ for t in allowed))
            return [f"{name}.{key}: every entry must be of type {kinds}"]
    if not set(mask) <= {0, 1}:
        return [f"{name}.loss_mask: every entry must be 0 or 1"]
    if any(compress(logprobs, map(not_, mask))):
        return [f"{name}.logprobs: must be 0.0 where loss_mask is 0"]
    return [
        f"{name}.logprobs: every entry must be from {LOWEST_LOGPROB:g} to 0 (got {_shown(value)})"
        for value in logprobs
        if not LOWEST_LOGPROB <= value <= 0
    ][:1]


def _turn_problems(turns: list[dict[str, Any]], segments: list[dict[str, Any]], name: str) -> list[str]:
    for place, turn in enumerate(turns):
        segment, start, end = turn["segment"], turn["start"], turn["end"]
        if turn["finish_reason"] == "replayed" and (segment, start, end) == (0, 0, 0):
            continue  # No model sampled this turn, and it has no tokens.
        if not 0 <= segment < len(segments):
            return [f"{name}.turns[{place}].segment: there is no segment {segment}"]
        if not 0 <= start <= end <= len(segments[segment]["response_ids"]):
            return [f"{name}.turns[{place}]: [{start}, {end}) does not lie in segment {segment}"]
    return []


def check_failures(document: Any) -> list[dict[str, Any]]:
    """Return the checked failures of a FailRequest.

    Raises:
        Invalid: A failure is wrong. None of the failures is accepted in this case.
    """
    items = _items(document, "failures")
    try:
        return [failure.model_dump() for failure in _FAILURES.validate_python(items)]
    except ValidationError as error:
        problems = describe(error, "failures")[:MAX_PROBLEMS]
        raise Invalid(problems[0], errors=problems) from error


def result_event(item: dict[str, Any]) -> tuple[str, events.Report]:
    """Return the rollout of a checked result, and what has happened to it."""
    token, carry = item["token"], item.get("carry")
    kept, times = pack(dumps(carry)) if carry else None, _times(item)
    if item["stage"] == "run":
        return item["rollout"], events.RunDone(
            token, item["packed"], carry=kept, counts=_counts(item), times=times
        )
    if item["stage"] == "eval":
        components = item.get("reward_components")
        return item["rollout"], events.Scored(
            token,
            float(item["reward"]),
            components=dumps(components) if components else None,
            reason=item.get("reward_reason") or None,
            output=item.get("reward_output") or None,
            times=times,
        )
    handle = item.get("sandbox")
    sandbox = None if handle is None else events.Sandbox(handle["id"], handle["node"], dumps(handle))
    return item["rollout"], events.InitDone(token, sandbox, kept, times)


def failure_event(item: dict[str, Any]) -> tuple[str, events.Report]:
    """Return the rollout of a checked failure, and what has happened to it."""
    names = ("token", "stage", "reason", "message", "return_to", "retryable", "counts")
    return item["rollout"], events.Failed(**{name: item[name] for name in names}, times=_times(item))


def _times(item: dict[str, Any]) -> events.Times:
    times = item.get("times") or {}
    names = ("model_seconds", "tool_seconds", "own_seconds")
    return events.Times(**{name: float(times.get(name, 0.0)) for name in names})


def _counts(item: dict[str, Any]) -> events.RunCounts:
    """Return what is counted in a Run.

    Replayed calls are not the policy's. An entry that names no tool, such as the one for calls beyond the
    largest number of a turn, is a call only if it is malformed.
    """
    trajectory, stats = item["trajectory"], item.get("stats") or {}
    turns = trajectory.get("turns") or ()
    calls = [
        (call["name"], (call.get("error") or "").startswith(MALFORMED_CALL))
        for turn in turns
        if turn["finish_reason"] != "replayed"
        for call in turn.get("tool_calls") or ()
    ]
    malformed = sum(wrong for _, wrong in calls)
    sampled = sum(sum(segment["loss_mask"]) for segment in trajectory.get("segments", []))
    return events.RunCounts(
        turns=len(turns),
        tool_calls=sum(len(turn.get("tool_calls") or ()) for turn in turns),
        cut=(trajectory.get("truncated_reason") or "")[:MAX_REASON],
        written_calls=malformed + sum(bool(name) and not wrong for name, wrong in calls),
        malformed_calls=malformed,
        template_breaks=trajectory.get("template_breaks", 0),
        sampled_tokens=sampled,
        spent_tokens=(stats.get("sampled_tokens", 0) or sampled) + stats.get("discarded_tokens", 0),
    )
