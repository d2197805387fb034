"""The parameters of a sampling request, and its checked answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard_crds.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of one request."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    allowed: tuple[int, ...] = ()
    """The only token ids that may be sampled. If it is empty, all ids are allowed."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of a backend's `/v1/models`."""

    name: str
    max_model_len: int | None = None
    """The maximum number of prompt and answer tokens together, or None if the backend does not say."""
    parent: str | None = None
    """The name of the base model, if this is a LoRA adapter."""
    logprobs_mode: str | None = None
    """The mode of log-probabilities, in vLLM's terms, if the backend says it."""
    folder: str | None = None
    """The folder or the repository that it was loaded from, if the backend says it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer. Its sequences are parallel and have the same length n."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probabilities of the sampled tokens, in nats."""
    finish_reason: FinishReason
    versions: tuple[str | None, ...] | None
    """The weight version of each token, or None if the answer does not say."""
    label: str | None = None
    """The weight version at the end of the answer, if the answer reports only that one."""
