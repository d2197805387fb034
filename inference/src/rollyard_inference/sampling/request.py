"""A sampling request's parameters, its checked answer, and the interface of a call that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollyard_crds.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one request."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    allowed: tuple[int, ...] = ()
    """Only these token ids; empty: all."""

    def at_most(self, max_tokens: int) -> Sampling:
        return replace(self, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of a backend's `/v1/models`."""

    name: str
    max_model_len: int | None = None
    """Tokens of prompt and answer together; None where the backend does not say."""
    parent: str | None = None
    """The base model, where this is a LoRA adapter."""
    logprobs_mode: str | None = None
    """As vLLM names the modes, where the backend says it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer; the sequences are parallel (length n)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """In nats, of the sampled tokens."""
    finish_reason: FinishReason
    versions: tuple[str | None, ...] | None
    """Weight version of each token; None where the answer does not say."""
    label: str | None = None
    """Weight version at the answer's end, where the answer says that much only."""


class SamplingCall(Protocol):
    """One call that takes token ids and gives token ids with log-probabilities."""

    @property
    def path(self) -> str:
        """Path of the call, after the base URL."""

    def body(self, model: ServedModel, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        """The request."""

    def parse(self, answer: object, prompt: Sequence[int], sampling: Sampling) -> Answer:
        """The checked answer.

        Raises:
            BackendMismatch: something is missing, of another length, or impossible.
            BackendRefused, BackendUnavailable: the answer is an error in the form of an answer.
        """

    def mode_probes(self, model: ServedModel, ids: tuple[int, int]) -> list[dict[str, Any]]:
        """Requests of one token each, whose answers tell what log-probabilities are given.

        Args:
            ids: two different ids of the model's vocabulary.
        """

    def mode(self, answers: Sequence[object], ids: tuple[int, int]) -> str:
        """`raw_logprobs`, `processed_logprobs`, `temperature_logprobs` or `unknown`."""
