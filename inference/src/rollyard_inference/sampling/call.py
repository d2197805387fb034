"""The interface of a call that samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rollyard_inference.sampling.checks import AnswerReader
from rollyard_inference.sampling.request import Answer, Sampling, ServedModel


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
