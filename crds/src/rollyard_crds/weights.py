"""Weight updates of a BackendPool: what a trainer asks for, and how it went."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollyard_crds.backendpool import BackendUrl
from rollyard_crds.base import Model, Path
from rollyard_crds.names import UNVERIFIED as UNVERIFIED

PolicyVersion = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\s:]+$")]
"""No spaces and no colons, so that none can be mistaken for one marked `UNVERIFIED`."""
PauseMode = Literal["abort", "wait", "keep"]


class CheckpointSource(Model):
    """A model folder that every backend can read."""

    path: Path
    """Hugging Face folder for vLLM, ONNX folder for the embedded engine."""


class LoraSource(Model):
    """A LoRA adapter that every backend can read."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Served under this name; the same name again replaces the adapter in place."""
    path: Path
    """The adapter's folder."""


class WeightSource(Model):
    """Where the new weights are: exactly one of the three."""

    checkpoint: CheckpointSource | None = None
    """A checkpoint folder, which the servers load."""
    lora: LoraSource | None = None
    """An adapter, which the servers load."""
    pushed: bool = False
    """The trainer has pushed them into the servers itself (and paused the pool before)."""

    @model_validator(mode="after")
    def _one(self) -> WeightSource:
        if (self.checkpoint is not None) + (self.lora is not None) + self.pushed != 1:
            raise ValueError("give exactly one of 'checkpoint', 'lora' and 'pushed: true'")
        return self


class LogprobReference(Model):
    """What the new weights must give for a fixed prompt."""

    prompt_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=4096)]
    """Token ids, length n."""
    logprobs: Annotated[list[Annotated[float, Field(le=0.001)]], Field(min_length=1, max_length=4095)]
    """Log-probability, in nats, of each token after the first, given those before it: length n - 1."""
    tolerance: Annotated[float, Field(gt=0, le=10)] | None = None
    """The largest permitted difference, in nats. The default depends on the data type in which the servers
    compute: 0.1 for float32, 0.5 for bfloat16 and float16."""

    @model_validator(mode="after")
    def _parallel(self) -> LogprobReference:
        if len(self.logprobs) != len(self.prompt_ids) - 1:
            raise ValueError(
                f"logprobs has {len(self.logprobs)} entries, expected {len(self.prompt_ids) - 1}: "
                "one for each of promptIds after the first"
            )
        return self


class WeightUpdateRequest(Model):
    """Body of `POST /v1/backendpools/{name}/weights`."""

    policy_version: PolicyVersion
    """Label of the new weights; every token sampled with them carries it."""
    source: WeightSource
    """Where they are."""
    mode: PauseMode = "abort"
    """The fate of requests in flight: `abort` returns their tokens so far, `wait` lets them end,
    `keep` freezes them and lets them continue with the new weights."""
    in_flight: Literal["continue", "restart"] = "continue"
    """Rollouts in Run continue from their tokens (partial rollout), or start again."""
    reference: LogprobReference | None = None
    """The values to verify against; default: a transformers forward pass where transformers is installed."""
    require_verified: bool = False
    """If true, an update that cannot be verified fails, instead of being marked `verified: false`."""


UpdateStep = Literal["Pending", "Pausing", "Loading", "Verifying", "Done", "Failed"]
UpdateState = Literal["Running", "Succeeded", "Failed", "Superseded"]


class BackendUpdate(Model):
    """How far the update of one backend has got."""

    url: BackendUrl
    """Base URL."""
    step: UpdateStep = "Pending"
    """What is being done now, or how it ended."""
    verified: bool = False
    """Its log-probabilities were compared and agree."""
    max_difference: float | None = None
    """Largest difference of a log-probability from the reference, in nats."""
    paused_seconds: float | None = None
    """From pause to resume."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Why it failed, or was not verified."""


class WeightUpdate(Model):
    """One update: the request, and its result on every backend."""

    id: int
    """Rises with every update of the pool."""
    policy_version: str
    """Label of the new weights."""
    source: WeightSource
    """Where they are."""
    mode: PauseMode
    """As asked."""
    in_flight: Literal["continue", "restart"]
    """As asked."""
    state: UpdateState
    """`Succeeded` when every backend has the new weights, and there is at least one; `Superseded` by a later
    update."""
    verified: bool = False
    """Whether every backend's log-probabilities agree with the reference."""
    verified_by: Literal["reference", "transformers", ""] = ""
    """What they were compared with. Where it is empty, nothing was compared and `verified` is false."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why it failed, was not verified, or what is missing."""
    backends: list[BackendUpdate] = Field(default_factory=list)
    """Each backend's part."""
    created_at: datetime
    """When it was requested."""
    finished_at: datetime | None = None
    """When the last backend was done."""
