"""What a `/process` call asks for: a row as a task, and a job with its parameters. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rollyard_crds.reading.manifest import describe
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.task_formats.interface import RowRefused
from rollyard_crds.task_formats.registry import FormatUnknown, task_format

from rollyard_api.backends.pools import merge
from rollyard_api.core.problems import Invalid

DEFAULT_SOURCE: Final = "swebench"
FORMATS: Final[dict[str, str]] = {"swebench": "swebench", "deepscaler": "verl", "deepcoder": "verl"}
"""The task format of each data source. The handler `mixed` chooses swe, math or code by what a task has."""
MAX_NAME: Final = 512
_QUESTIONS: Final = ("problem", "question")


@dataclass(frozen=True, slots=True)
class Formats:
    """The task formats by data source, and the file that `swebench` may need beside its rows."""

    by_source: Mapping[str, str]
    specs: Mapping[str, Any] | None = None

    def check(self) -> str:
        """Return why a format cannot be used, or "" if all can."""
        for source, name in self.by_source.items():
            try:
                task_format(name)
            except FormatUnknown as error:
                return f"dataSources.{source}: {error}"
        return ""


def name_of(instance: Mapping[str, Any], field: str) -> str | int | None:
    """Return `instance_id` or `trajectory_id` of an instance.

    Raises:
        Invalid: It is neither a short text nor a number.
    """
    value = instance.get(field)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63):
        return value
    if isinstance(value, str) and len(value) <= MAX_NAME:
        return value
    raise _refused(field, f"must be a text of at most {MAX_NAME} characters or a number")


def task_of(instance: Mapping[str, Any], task_id: str, formats: Formats) -> Task:
    """Return the task of a row, under an id of ours.

    Raises:
        Invalid: The row is no task of its data source. The message names the field.
    """
    source = instance.get("data_source")
    source = DEFAULT_SOURCE if source is None else source
    if not isinstance(source, str) or source not in formats.by_source:
        known = ", ".join(sorted(formats.by_source))
        raise _refused("data_source", f"must be one of {known}")
    name = formats.by_source[source]
    made = task_format(name)
    row = {**instance, "data_source": source}
    try:
        if name == "swebench" and formats.specs is not None:
            made.configure(formats.specs)
        if name == "verl":
            row["prompt"] = _conversation(row)
        fields = made.read(row, 1)
    except RowRefused as error:
        raise Invalid(f"instance.{error}", errors=[f"instance.{error}"]) from error
    metadata = {
        "data_source": source,
        "instance_id": name_of(instance, "instance_id"),
        "trajectory_id": name_of(instance, "trajectory_id"),
    }
    try:
        return Task.model_validate({**fields, "id": task_id, "metadata": metadata})
    except ValidationError as error:
        problems = describe(error, "instance", Task)
        raise Invalid.of(*problems) from error


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


_FIXED: Final = ("tasks", "backendRef", "samplesPerTask", "dynamicSampling", "minGroupSize", "handler")


class RolloutParams(BaseModel):
    """The parameters that a rollout depends on. The others of the protocol have no counterpart here."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    max_iterations: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Assistant turns."""
    temperature: Annotated[float, Field(ge=0.0, le=5.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Sampled tokens of one turn."""
    max_model_len: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """Prompt, sampled and tool tokens together."""


def template_problem(template: dict[str, Any], pool: str) -> str:
    """Return why this part of a spec cannot be that of the jobs, or "" if it can."""
    for name in _FIXED:
        if name in template:
            return f"spec.{name}: is decided by the calls themselves; remove it"
    try:
        job_spec(template, pool, RolloutParams())
    except ValidationError as error:
        first = error.errors()[0]
        return f"spec.{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return ""


def job_spec(template: dict[str, Any], pool: str, params: RolloutParams) -> RolloutJobSpec:
    """Return the spec of the stream job whose rollouts have these parameters.

    Every call is a task of its own with one sample, as the client asks for each sample by itself. The handler
    is `mixed`, so that one job takes the rows of all data sources.

    Raises:
        pydantic.ValidationError: A field of the template is wrong.
    """
    agent = {"maxTurns": params.max_iterations, "maxContextTokens": params.max_model_len}
    sampling = {
        "temperature": params.temperature,
        "topP": params.top_p,
        "maxTokens": params.max_output_tokens,
    }
    asked = {
        "agent": {name: value for name, value in agent.items() if value is not None},
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "tasks": {"stream": True},
        "handler": "mixed",
        "samplesPerTask": 1,
        "minGroupSize": 1,
        "backendRef": {"name": pool},
    }
    return RolloutJobSpec.model_validate(merge(template, asked))
