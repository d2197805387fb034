"""What a `/process` call asks for: a row as a task, and a job with its parameters. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_tasks.formats.interface import RowRefused
from rollyard_tasks.formats.registry import task_format

from rollyard_api.backends.pools import merge
from rollyard_api.core.codec import validated
from rollyard_api.core.problems import Invalid

DEFAULT_SOURCE: Final = "swebench"
FORMATS: Final[dict[str, str]] = {"swebench": "swebench", "deepscaler": "verl", "deepcoder": "verl"}
"""The task format of each data source. The handler `mixed` chooses swe, math or code by what a task has."""
NAMES: Final = ("instance_id", "trajectory_id")
"""What clients name a row and a sample by. The answer repeats both."""
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
        Invalid: The row is no task of its data source. The message names the field.
    """
    source = instance.get("data_source")
    source = DEFAULT_SOURCE if source is None else source
    if not isinstance(source, str) or source not in formats:
        raise _refused("data_source", f"must be one of {', '.join(sorted(formats))}")
    made = task_format(formats[source])
    row = {**instance, "data_source": source}
    try:
        if formats[source] == "swebench" and specs is not None:
            made.configure(specs)
        if formats[source] == "verl":
            row["prompt"] = _conversation(row)
        fields = made.read(row, 1)
    except RowRefused as error:
        raise Invalid.of(f"instance.{error}") from error
    metadata = {"data_source": source} | {name: _name_of(instance, name) for name in NAMES}
    return validated(Task, {**fields, "id": "new", "metadata": metadata}, "instance")


def _conversation(row: Mapping[str, Any]) -> Any:
    """Return the conversation of a math or code row: its `prompt`, or else its question."""
    given = row.get("prompt")
    if given is None:
        extra = row.get("extra_info")
        columns = [row, extra] if isinstance(extra, Mapping) else [row]
        found = (column[name] for column in columns for name in _QUESTIONS if column.get(name) is not None)
        given = next(found, None)
    if isinstance(given, str) and not given.lstrip().startswith("["):
        return [{"role": "user", "content": given}]
    return given


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

    Every call is a task of its own with one sample, as the client asks for each sample by itself. The handler
    is `mixed`, so that one job takes the rows of all data sources.

    Raises:
        pydantic.ValidationError: A field of the template is wrong.
    """
    dumped = partial(params.model_dump, by_alias=True, exclude_none=True)
    asked = {
        "agent": dumped(include=_OF_AGENT),
        "sampling": dumped(exclude=_OF_AGENT),
        "tasks": {"stream": True},
        "handler": "mixed",
        "samplesPerTask": 1,
        "minGroupSize": 1,
        "backendRef": {"name": pool},
    }
    return RolloutJobSpec.model_validate(merge(template, asked))
