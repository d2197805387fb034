"""vLLM's two calls with token ids in and out: a pure translation, with every check of an answer.

`/inference/v1/generate` (vLLM with `--enable-scale-out`) also reports which weight version sampled which
token, at its end. `/v1/completions` with `return_token_ids` repeats the prompt's ids instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from rollyard_inference.errors import BackendMismatch
from rollyard_inference.replies import raise_error
from rollyard_inference.sampling.checks import (
    LOGPROB_TOLERANCE,
    AnswerReader,
    kind,
    mapping,
    one_choice,
    same_count,
    same_prompt,
    token_ids,
    versions_of,
)
from rollyard_inference.sampling.request import Answer, Sampling, ServedModel

_STREAM_INTERVAL: Final = 32
"""The number of tokens in one event. An event for every token would cost both sides much more time."""


def _params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # These are sent because a server takes omitted values from the model's generation_config.json.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "logprobs": 0,
    }
    if sampling.allowed:
        params["allowed_token_ids"] = list(sampling.allowed)
    return params


def _mode_samplings(ids: tuple[int, int]) -> list[Sampling]:
    return [
        Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=1, seed=0, allowed=(token,))
        for token in ids
    ]


def _mode(answers: Sequence[Answer], ids: tuple[int, int]) -> str:
    """Return the kind of the log-probabilities of two tokens that were each the only one allowed.

    After processing, the only token has probability 1. Before processing, two tokens cannot both have it.
    """
    if [answer.token_ids for answer in answers] != [(token,) for token in ids]:
        return "unknown"
    processed = all(abs(answer.logprobs[0]) <= LOGPROB_TOLERANCE for answer in answers)
    return "processed_logprobs" if processed else "raw_logprobs"


class _Vllm(ABC):
    """The part that both calls share: finding out the server's logprobs mode."""

    @abstractmethod
    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]: ...

    @abstractmethod
    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader: ...

    def mode_probes(self, model: ServedModel, ids: tuple[int, int]) -> list[dict[str, Any]]:
        return [self.body(model, ids[:1], sampling) for sampling in _mode_samplings(ids)]

    def mode(self, answers: Sequence[object], ids: tuple[int, int]) -> str:
        read: list[Answer] = []
        for document, sampling in zip(answers, _mode_samplings(ids), strict=True):
            reader = self.reader(ids[:1], sampling)
            reader.feed(document)
            read.append(reader.answer())
        return _mode(read, ids)


class VllmGenerate(_Vllm):
    """The call `POST /inference/v1/generate`."""

    path: Final = "/inference/v1/generate"
    streams: Final = True

    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]:
        """Return the body of a request for tokens."""
        params = _params(sampling)
        body = {
            "model": model.name,
            "token_ids": list(prompt),
            "sampling_params": params,
            "stream": stream,
        }
        if stream:
            params["stream_interval"] = _STREAM_INTERVAL
            # Every event has the number of the prompt's tokens then, so also a stream that is cut is checked.
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return body

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader:
        """Return what reads the answer."""
        return _GenerateReader(prompt, sampling)


class _GenerateReader(AnswerReader):
    def feed(self, event: object) -> None:
        body = mapping(event, "the answer")
        if "error" in body:
            raise_error(f"POST {VllmGenerate.path}", body)
        if self.finish_reason is not None and body.get("choices") == []:
            return  # The last event of a stream has the usage alone, which each event before it had.
        choice = one_choice(body)
        echoed = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
        if echoed is None:
            same_count(_usage(body).get("prompt_tokens"), self._prompt, "usage.prompt_tokens")
        else:
            same_prompt(echoed, self._prompt)
        ids = token_ids(choice.get("token_ids"), "token_ids")
        content = mapping(choice.get("logprobs"), "logprobs").get("content")
        if not isinstance(content, list):
            raise BackendMismatch(
                f"logprobs.content is {kind(content)}, expected a list of {len(ids)} entries"
            )
        try:
            tokens = [entry["token_id"] for entry in content]
            values = [entry["logprob"] for entry in content]
        except (TypeError, KeyError) as error:
            raise BackendMismatch(
                f"an entry of logprobs.content lacks token_id or logprob: {error!r}"
            ) from error
        if tokens != ids and len(tokens) == len(ids):
            index = next(i for i, (a, b) in enumerate(zip(tokens, ids, strict=True)) if a != b)
            raise BackendMismatch(
                f"logprobs.content[{index}] is of token {tokens[index]}, token_ids[{index}] is {ids[index]}"
            )
        self._add(ids, values)
        finish = choice.get("finish_reason")
        if finish is not None:
            self._end(finish, versions_of(choice.get("weight_versions"), len(self.token_ids)))


class VllmCompletions(_Vllm):
    """The call `POST /v1/completions` with `return_token_ids`."""

    path: Final = "/v1/completions"
    streams: Final = True

    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]:
        """Return the body of a request for tokens."""
        body = {
            "model": model.name,
            "prompt": list(prompt),
            "return_token_ids": True,
            "stream": stream,
            **_params(sampling),
        }
        return body | {"stream_interval": _STREAM_INTERVAL} if stream else body

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader:
        """Return what reads the answer."""
        return _CompletionsReader(prompt, sampling)


class _CompletionsReader(AnswerReader):
    _checked = False

    def feed(self, event: object) -> None:
        body = mapping(event, "the answer")
        if "error" in body:
            raise_error(f"POST {VllmCompletions.path}", body)
        choice = one_choice(body)
        if not self._checked:
            echoed = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
            if echoed is None:
                raise BackendMismatch(
                    "no prompt_token_ids in the answer: the server must support return_token_ids"
                )
            same_prompt(echoed, self._prompt)
            self._checked = True
        if body.get("usage") is not None:
            same_count(_usage(body).get("prompt_tokens"), self._prompt, "usage.prompt_tokens")
        ids = token_ids(choice.get("token_ids"), "token_ids")
        values = mapping(choice.get("logprobs"), "logprobs").get("token_logprobs")
        if not isinstance(values, list):
            raise BackendMismatch(f"logprobs.token_logprobs is {kind(values)}, expected {len(ids)} numbers")
        self._add(ids, values)
        finish = choice.get("finish_reason")
        if finish is not None:
            self._end(finish, versions_of(choice.get("weight_versions"), len(self.token_ids)))


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    return mapping(body.get("usage"), "usage")
