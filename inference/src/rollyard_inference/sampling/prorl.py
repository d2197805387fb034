"""ProRL Agent's `/generate` with token ids in and out: a pure translation, with every check of an answer.

The request is `{prompt_ids, max_tokens, temperature, top_p, seed}`, the answer `{response_ids, logprobs}`.
The answer has neither the prompt nor a finish reason: an answer of `max_tokens` tokens counts as cut off, and
every shorter one as ended by the model. Such servers report no weight version and no kind of
log-probabilities, and need have neither `/health` nor `/v1/models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollyard_inference.errors import BackendMismatch, BackendRefused
from rollyard_inference.sampling.checks import AnswerReader, kind, mapping, token_ids
from rollyard_inference.sampling.request import Sampling, ServedModel


class ProrlGenerate:
    """The call `POST /generate` of ProRL Agent's inference servers."""

    path: Final = "/generate"
    streams: Final = False

    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]:
        """Return the body of a request for tokens. The call has no streams.

        Raises:
            BackendRefused: The protocol cannot restrict the tokens as it is asked to.
        """
        if sampling.top_k > 0 or sampling.allowed:
            feature = "topK" if sampling.top_k > 0 else "a list of allowed tokens"
            raise BackendRefused(
                f"ProRL's {self.path} knows no {feature}; leave it out, or use another server"
            )
        return {
            "prompt_ids": list(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader:
        """Return what reads the answer."""
        return _Reader(prompt, sampling)

    def mode_probes(self, model: ServedModel, ids: tuple[int, int]) -> list[dict[str, Any]]:
        """Return no request, because none can show the kind of log-probabilities."""
        return []

    def mode(self, answers: Sequence[object], ids: tuple[int, int]) -> str:
        """Return `unknown`."""
        return "unknown"


class _Reader(AnswerReader):
    def feed(self, event: object) -> None:
        body = mapping(event, "the answer")
        ids = token_ids(body.get("response_ids"), "response_ids")
        values = body.get("logprobs")
        if not isinstance(values, list):
            raise BackendMismatch(f"logprobs is {kind(values)}, expected a list of {len(ids)} numbers")
        self._add(ids, values)
        self._end("length" if len(ids) >= self._sampling.max_tokens else "stop", None)
