"""The parameters of a sampling request, its checked answer, and the interface of a call that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollyard_crds.trajectory import FinishReason

    from rollyard_inference.sampling.checks import AnswerReader


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


class SamplingCall(Protocol):
    """A call that takes token ids and returns token ids with log-probabilities."""

    @property
    def path(self) -> str:
        """The path of the call, after the base URL."""

    @property
    def streams(self) -> bool:
        """Whether the answer can come as events while it is sampled."""

    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]:
        """Return the body of the request.

        Args:
            stream: Whether the answer is to come as events while it is sampled, where the call can do that.
        """

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader:
        """Return what reads the answer, whether it comes in one piece or as events."""

    def mode_probes(self, model: ServedModel, ids: tuple[int, int]) -> list[dict[str, Any]]:
        """Return requests of one token each, whose answers show the kind of log-probabilities.

        Args:
            model: The model to sample from.
            ids: Two different ids of the model's vocabulary.
        """

    def mode(self, answers: Sequence[object], ids: tuple[int, int]) -> str:
        """Return the kind of the log-probabilities in the answers to the probes.

        It is `raw_logprobs`, `processed_logprobs`, `temperature_logprobs` or `unknown`.
        """


def parsed(call: SamplingCall, document: object, prompt: Sequence[int], sampling: Sampling) -> Answer:
    """Return the checked answer of a request whose answer came in one piece.

    Raises:
        BackendMismatch, BackendRefused, BackendUnavailable: See `AnswerReader.feed`.
    """
    reader = call.reader(prompt, sampling)
    reader.feed(document)
    return reader.answer()
