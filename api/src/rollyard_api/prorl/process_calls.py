"""What a `/process` call asks for, and how it is answered. This module is pure.

A call has a row, which becomes a task, and the parameters of a job. The answer has a trajectory in the form
of ProRL Agent. Token ids are arranged so that both readings of the form give the exact sequence: the
`token_ids` of all messages one after the other are the ids of the segment, and the `input_ids` of an
assistant's message are the ids that its request had as a prompt. Ids between two assistant's messages, which
the chat template and the tools made, belong to the message before the later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import turns_said
from rollyard_tasks.formats.interface import RowRefused
from rollyard_tasks.formats.registry import task_format

from rollyard_api.backends.pools import merge
from rollyard_api.core.codec import validated
from rollyard_api.core.problems import Invalid

DEFAULT_SOURCE: Final = "swebench"
FORMATS: Final[dict[str, str]] = {"swebench": "swebench", "deepscaler": "verl", "deepcoder": "verl"}
"""The task format of each data source. The handler `mixed` chooses swe, math or code by what a task has."""
NAMES: Final = ("instance_id", "trajectory_id")
"""How clients name a row and a sample. The answer repeats both."""
MAX_NAME: Final = 512
_QUESTIONS: Final = ("problem", "question")


def _name_of(instance: Mapping[str, Any], field: str) -> str | int | None:
    value = instance.get(field)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63):
        return value
    if isinstance(value, str) and len(value) <= MAX_NAME:
        return value
    raise _refused(field, f"must be a text of at most {MAX_NAME} characters or a number")


def task_of(
    instance: Mapping[str, Any], formats: Mapping[str, str], specs: Mapping[str, Any] | None = None
) -> Task:
    """Return the task of a row, whose id is a placeholder.

    Args:
        instance: The row.
        formats: The task formats by data source.
        specs: The file that the format `swebench` may need beside its rows.

    Raises:
        Invalid: The row is not a task of its data source. The message names the field.
    """
    source = instance.get("data_source")
    source = DEFAULT_SOURCE if source is None else source
    if not isinstance(source, str) or source not in formats:
        raise _refused("data_source", f"must be one of {', '.join(sorted(formats))}")
    reader = task_format(formats[source])
    row = {**instance, "data_source": source}
    try:
        if formats[source] == "swebench" and specs is not None:
            reader.configure(specs)
        if formats[source] == "verl":
            row["prompt"] = _conversation(row)
        fields = reader.read(row, 1)
    except RowRefused as error:
        raise Invalid.of(f"instance.{error}") from error
    metadata = {"data_source": source} | {name: _name_of(instance, name) for name in NAMES}
    return validated(Task, {**fields, "id": "new", "metadata": metadata}, "instance")


def _conversation(row: Mapping[str, Any]) -> Any:
    """Return the conversation of a math or code row: its `prompt`, or else its question."""
    prompt = row.get("prompt")
    if prompt is None:
        extra = row.get("extra_info")
        columns = [row, extra] if isinstance(extra, Mapping) else [row]
        questions = (
            column[name] for column in columns for name in _QUESTIONS if column.get(name) is not None
        )
        prompt = next(questions, None)
    if isinstance(prompt, str) and not prompt.lstrip().startswith("["):
        return [{"role": "user", "content": prompt}]
    return prompt


def _refused(field: str, problem: str) -> Invalid:
    return Invalid.of(f"instance.{field}: {problem}")


class RolloutParams(BaseModel):
    """The parameters that a rollout depends on. The others of the protocol have no counterpart here."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    max_iterations: int | None = Field(None, ge=1, le=10_000, serialization_alias="maxTurns")
    """Assistant turns."""
    temperature: float | None = Field(None, ge=0.0, le=5.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0, serialization_alias="topP")
    max_output_tokens: int | None = Field(None, ge=1, le=1_000_000, serialization_alias="maxTokens")
    """Sampled tokens of one turn."""
    max_model_len: int | None = Field(None, ge=16, le=10_000_000, serialization_alias="maxContextTokens")
    """Prompt, sampled and tool tokens together."""


_OF_AGENT: Final = {"max_iterations", "max_model_len"}
"""The parameters that belong to a job's agent. The others belong to its sampling."""


def job_spec(template: dict[str, Any], pool: str, params: RolloutParams) -> RolloutJobSpec:
    """Return the spec of the stream job whose rollouts have these parameters.

    Every call is a task of its own with one sample, because clients ask for each sample separately. The
    handler is `mixed`, so that one job takes the rows of all data sources.

    Raises:
        pydantic.ValidationError: A field of the template is wrong.
    """
    dumped = partial(params.model_dump, by_alias=True, exclude_none=True)
    overrides = {
        "agent": dumped(include=_OF_AGENT),
        "sampling": dumped(exclude=_OF_AGENT),
        "tasks": {"stream": True},
        "handler": "mixed",
        "samplesPerTask": 1,
        "minGroupSize": 1,
        "backendRef": {"name": pool},
    }
    return RolloutJobSpec.model_validate(merge(template, overrides))


MAX_INPUT_IDS: Final = 4_000_000
"""The largest number of `input_ids` in one answer. Beyond it, only the last assistant's message has them."""
_TIMEOUTS: Final = ("Timeout", "DeadlineExceeded", "LeaseExpired")

Json = dict[str, Any]


def process_answer(trajectory: Mapping[str, Any], *, names: Mapping[str, Any], tools: Sequence[str]) -> Json:
    """Return the body of the answer to `/process`.

    Args:
        trajectory: The record of the rollout.
        names: The client's names of the row and the sample.
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
    turn_numbers = turns_said([message["role"] for message in messages], len(turns))
    spans = {index: turns[no] for index, no in turn_numbers.items() if turns[no]["end"] > turns[no]["start"]}
    segments = trajectory["segments"]
    if not segments or not spans:
        return messages
    last = max(turn["segment"] for turn in spans.values())
    segment = segments[last]
    ids = segment["prompt_ids"] + segment["response_ids"]
    begins = len(segment["prompt_ids"])
    chosen = {index: turn for index, turn in spans.items() if turn["segment"] == last}
    whole = sum(begins + turn["start"] for turn in chosen.values()) <= MAX_INPUT_IDS
    arranged: list[Json] = []
    reached = 0
    for index, message in enumerate(messages):
        turn = chosen.get(index)
        if turn is not None:
            start, end = turn["start"], turn["end"]
            outside = ids[reached : begins + start]
            if outside:
                _hold(arranged, outside)
            message["token_ids"] = segment["response_ids"][start:end]
            message["logprobs"] = segment["logprobs"][start:end]
            if whole or index == max(chosen):
                message["input_ids"] = ids[: begins + start]
            reached = begins + end
        arranged.append(message)
    return arranged


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


def _hold(messages: list[Json], outside: list[int]) -> None:
    """Give ids that were not sampled to the message before, or to an empty one if that is an assistant's."""
    if not messages or messages[-1]["role"] == "assistant":
        messages.append(_plain({"role": "system", "content": ""}))
    messages[-1]["token_ids"] = outside
    messages[-1]["logprobs"] = [0.0] * len(outside)
