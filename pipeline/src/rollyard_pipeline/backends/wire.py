"""Requests to and answers from vLLM's API: pure translation, and every check of an answer.

Two calls give token ids and log-probabilities; `/inference/v1/generate` also says which
weight version sampled which token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard_crds.trajectory import FinishReason

from rollyard_pipeline.errors import BackendMismatch
from rollyard_pipeline.recorder import Sample

GENERATE_PATH: Final = "/inference/v1/generate"
COMPLETIONS_PATH: Final = "/v1/completions"

_LOGPROB_TOLERANCE: Final = 1e-3  # nats above 0 that rounding in reduced precision explains
_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of one request."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int

    def params(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "logprobs": 0,
        }


def generate_body(model: str, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "token_ids": list(prompt),
        "sampling_params": sampling.params(),
        "return_token_ids": True,
        "stream": False,
    }


def completions_body(model: str, prompt: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(prompt),
        "return_token_ids": True,
        "stream": False,
        **sampling.params(),
    }


def parse_generate(answer: object, prompt: Sequence[int], sampling: Sampling, version: str) -> Sample:
    """The sample in an answer of `/inference/v1/generate`.

    Raises:
        BackendMismatch: something is missing, of another length, or impossible.
    """
    body = _mapping(answer, "the answer")
    choice = _choice(body)
    echoed = body.get("prompt_token_ids", choice.get("prompt_token_ids"))
    if echoed is not None:
        _same_prompt(_ids(echoed, "prompt_token_ids"), prompt)
    ids = _ids(choice.get("token_ids"), "token_ids")
    logprobs = _mapping(choice.get("logprobs"), "logprobs")
    content = logprobs.get("content")
    if not isinstance(content, list):
        raise BackendMismatch(f"logprobs.content is {_kind(content)}, expected a list of {len(ids)} entries")
    values: list[object] = []
    for place, entry in enumerate(content):
        item = _mapping(entry, f"logprobs.content[{place}]")
        if place < len(ids) and item.get("token_id", ids[place]) != ids[place]:
            raise BackendMismatch(
                f"logprobs.content[{place}] is of token {item.get('token_id')}, "
                f"token_ids[{place}] is {ids[place]}"
            )
        values.append(item.get("logprob"))
    return _sample(choice, ids, values, _versions(choice.get("weight_versions"), len(ids), version), sampling)


def parse_completions(answer: object, prompt: Sequence[int], sampling: Sampling, version: str) -> Sample:
    """The sample in an answer of `/v1/completions` with `return_token_ids`.

    Raises:
        BackendMismatch: something is missing, of another length, or impossible.
    """
    body = _mapping(answer, "the answer")
    choice = _choice(body)
    echoed = choice.get("prompt_token_ids", body.get("prompt_token_ids"))
    if echoed is None:
        raise BackendMismatch("no prompt_token_ids in the answer: the server must support return_token_ids")
    _same_prompt(_ids(echoed, "prompt_token_ids"), prompt)
    ids = _ids(choice.get("token_ids"), "token_ids")
    logprobs = _mapping(choice.get("logprobs"), "logprobs")
    values = logprobs.get("token_logprobs")
    if not isinstance(values, list):
        raise BackendMismatch(f"logprobs.token_logprobs is {_kind(values)}, expected {len(ids)} numbers")
    return _sample(choice, ids, values, _versions(choice.get("weight_versions"), len(ids), version), sampling)


def _sample(
    choice: dict[str, Any],
    ids: list[int],
    values: Sequence[object],
    versions: tuple[str, ...],
    sampling: Sampling,
) -> Sample:
    if len(values) != len(ids):
        raise BackendMismatch(f"{len(ids)} token_ids but {len(values)} logprobs")
    if len(ids) > sampling.max_tokens:
        raise BackendMismatch(f"{len(ids)} tokens sampled, max_tokens was {sampling.max_tokens}")
    logprobs: list[float] = []
    for place, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BackendMismatch(f"logprob {place} is {value!r}, expected a finite number")
        if value > _LOGPROB_TOLERANCE:
            raise BackendMismatch(f"logprob {place} is {value}, above 0")
        logprobs.append(min(float(value), 0.0))
    raw = choice.get("finish_reason")
    finish = _FINISH.get(raw) if isinstance(raw, str) else None
    if finish is None:
        raise BackendMismatch(f"finish_reason is {raw!r}, expected one of {', '.join(_FINISH)}")
    if not ids and finish != "abort":
        raise BackendMismatch(f"no token sampled, finish_reason '{finish}'")
    return Sample(tuple(ids), tuple(logprobs), versions, finish)


def _versions(ranges: object, count: int, default: str) -> tuple[str, ...]:
    """One label a token from vLLM's `[{version, start, end}]`; `default` where it says nothing."""
    labels = [default] * count
    if ranges is None:
        return tuple(labels)
    if not isinstance(ranges, list):
        raise BackendMismatch(f"weight_versions is {_kind(ranges)}, expected a list")
    for entry in ranges:
        item = _mapping(entry, "an entry of weight_versions")
        start, end = item.get("start"), item.get("end")
        if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= count):
            raise BackendMismatch(f"weight_versions says tokens {start!r} to {end!r} of {count}")
        label = item.get("version")
        labels[start:end] = [default if label is None else str(label)] * (end - start)
    return tuple(labels)


def _same_prompt(echoed: list[int], sent: Sequence[int]) -> None:
    if echoed == list(sent):
        return
    if len(echoed) != len(sent):
        raise BackendMismatch(f"the backend read {len(echoed)} prompt ids, {len(sent)} were sent")
    place = next(i for i, (a, b) in enumerate(zip(echoed, sent, strict=True)) if a != b)
    raise BackendMismatch(f"prompt id {place} is {echoed[place]} at the backend, {sent[place]} was sent")


def _choice(body: dict[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        count = len(choices) if isinstance(choices, list) else _kind(choices)
        raise BackendMismatch(f"choices is {count}, expected a list of one")
    return _mapping(choices[0], "choices[0]")


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BackendMismatch(f"{what} is {_kind(value)}, expected an object")
    return value


def _ids(value: object, what: str) -> list[int]:
    if not isinstance(value, list):
        raise BackendMismatch(f"{what} is {_kind(value)}, expected a list of token ids")
    for place, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise BackendMismatch(f"{what}[{place}] is {item!r}, expected a token id")
    return value


def _kind(value: object) -> str:
    return "missing" if value is None else type(value).__name__
