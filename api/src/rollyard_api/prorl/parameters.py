"""Sampling parameters of a `/process` call, and the spec of the RolloutJob that has them. It is pure."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_api.backends.pools import merge

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


def digest_of(spec: RolloutJobSpec) -> str:
    """Return the SHA-256 of a spec, by which the open job with this spec is found."""
    return hashlib.sha256(orjson.dumps(spec.to_json(), option=orjson.OPT_SORT_KEYS)).hexdigest()
