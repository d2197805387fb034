"""SGLang's native `/generate` with token ids in and out: a pure translation, with every check.

It follows the documentation and the request and answer types of SGLang 0.5 (its "Native APIs" and "Sampling
Parameters" pages, `GenerateReqInput`, `SamplingParams`). It was checked against that contract only, and never
against a running server. These parts of the contract matter here:

- `meta_info.output_token_logprobs` is a list of `[logprob, token_id, text or null]`, with one entry for each
  sampled token, the end-of-turn token included. `output_ids` may lack that last token.
- Log-probabilities are those after temperature and before top-p and top-k. A server that was started with
  `SGLANG_RETURN_ORIGINAL_LOGPROB=1` returns those before temperature.
- `meta_info.weight_version` is the label at the answer's end. Later versions also return
  `meta_info.weight_versions`, which is `[{version, start, end}]` as in vLLM.
- `sampling_seed` has an effect only on servers that were started with `--enable-deterministic-inference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollyard_inference.errors import BackendMismatch, BackendRefused, BackendUnavailable
from rollyard_inference.replies import raise_error
from rollyard_inference.sampling.checks import (
    AnswerReader,
    kind,
    mapping,
    same_count,
    token_ids,
    versions_of,
)
from rollyard_inference.sampling.request import Sampling, ServedModel

_STREAM_INTERVAL: Final = 32  # Tokens in one event of a stream, at least.
# An event repeats all tokens before it, so there are at most so many of them.
_MOST_EVENTS: Final = 64
_TEMPERATURES: Final = (1.0, 0.25)
# In nats. This is the tolerance for two logprobs of one token from two runs of the model.
_SAME: Final = 0.01


class SglangGenerate:
    """The call `POST /generate`."""

    path: Final = "/generate"
    streams: Final = True

    def body(
        self, model: ServedModel, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> dict[str, Any]:
        """Return the body of a request for tokens."""
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # These are sent because a server takes omitted values from the model's generation_config.json.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": sampling.max_tokens,
            "sampling_seed": sampling.seed,
        }
        if stream:
            params["stream_interval"] = max(_STREAM_INTERVAL, sampling.max_tokens // _MOST_EVENTS)
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": params,
            "return_logprob": True,
            "stream": stream,
        }
        if model.parent is not None:
            body["lora_path"] = model.name
        return body

    def reader(self, prompt: Sequence[int], sampling: Sampling) -> AnswerReader:
        """Return what reads the answer."""
        return _Reader(prompt, sampling)

    def mode_probes(self, model: ServedModel, ids: tuple[int, int]) -> list[dict[str, Any]]:
        """Return the bodies of the requests that show which log-probabilities the server gives."""
        bodies = []
        for temperature in _TEMPERATURES:
            sampling = Sampling(temperature=temperature, top_p=1.0, top_k=-1, max_tokens=1, seed=0)
            bodies.append(self.body(model, ids[:1], sampling) | {"token_ids_logprob": list(ids)})
        return bodies

    def mode(self, answers: Sequence[object], ids: tuple[int, int]) -> str:
        """Return the kind of the log-probabilities in the answers to the probes.

        The difference between the logprobs of two tokens is either divided by the temperature or not affected
        by it.
        """
        plain, sharp = (_difference(answer, ids) for answer in answers)
        if plain is None or sharp is None or abs(plain) <= 4 * _SAME:
            return "unknown"
        if abs(sharp - plain) <= _SAME:
            return "raw_logprobs"
        expected = plain * _TEMPERATURES[0] / _TEMPERATURES[1]
        return "temperature_logprobs" if abs(sharp - expected) <= 4 * _SAME else "unknown"


class _Reader(AnswerReader):
    def feed(self, event: object) -> None:
        body = mapping(event, "the answer")
        if "error" in body and "meta_info" not in body:
            raise_error(f"POST {SglangGenerate.path}", body)
        meta = mapping(body.get("meta_info"), "meta_info")
        finish = _finish(meta)
        same_count(meta.get("prompt_tokens"), self._prompt, "meta_info.prompt_tokens")
        entries = meta.get("output_token_logprobs")
        if not isinstance(entries, list):
            raise BackendMismatch(f"meta_info.output_token_logprobs is {kind(entries)}, expected a list")
        pairs = [_pair(index, entry) for index, entry in enumerate(entries)]
        ids = token_ids([token for _, token in pairs], "meta_info.output_token_logprobs")
        # An event has all tokens so far, or with --incremental-streaming-output only those that are new.
        count, before = meta.get("completion_tokens"), len(self.token_ids)
        known = before if count == len(ids) else 0
        if ids[:known] != self.token_ids[:known]:
            raise BackendMismatch(f"an event has {len(ids)} ids that do not begin with the {known} before it")
        new = ids[known:]
        same_count(count, [*self.token_ids, *new], "meta_info.completion_tokens")
        if "output_ids" in body:
            _same_output(token_ids(body["output_ids"], "output_ids"), ids, finish)
        self._add(new, [value for value, _ in pairs[known:]])
        self._add_label(meta.get("weight_version"))
        if finish is not None:
            self._end(finish.get("type"), versions_of(meta.get("weight_versions"), len(self.token_ids)))


def _finish(meta: dict[str, Any]) -> dict[str, Any] | None:
    """Return `meta_info.finish_reason`, or None if the answer has not ended.

    Raises:
        BackendUnavailable, BackendRefused: The finish reason says that the request failed.
    """
    if meta.get("finish_reason") is None:
        return None
    finish = mapping(meta["finish_reason"], "meta_info.finish_reason")
    status = finish.get("status_code")
    if finish.get("type") == "abort" and isinstance(status, int):
        message = f"aborted with status {status}: {finish.get('message')}"
        raise BackendUnavailable(message) if status >= 500 else BackendRefused(message)
    return finish


def _pair(index: int, entry: object) -> tuple[object, object]:
    if not isinstance(entry, list) or len(entry) < 2:
        raise BackendMismatch(
            f"meta_info.output_token_logprobs[{index}] is {entry!r}, expected [logprob, token id, text]"
        )
    return entry[0], entry[1]


def _same_output(output: list[int], ids: list[int], finish: dict[str, Any] | None) -> None:
    if output == ids:
        return
    # Some versions trim the token that ended the turn from output_ids.
    stop = {} if finish is None else finish
    if stop.get("type") == "stop" and output == ids[:-1] and stop.get("matched") == ids[-1]:
        return
    raise BackendMismatch(f"output_ids has {len(output)} ids that are not the {len(ids)} with logprobs")


def _difference(answer: object, ids: tuple[int, int]) -> float | None:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    steps = meta.get("output_token_ids_logprobs") if isinstance(meta, dict) else None
    if not isinstance(steps, list) or len(steps) != 1 or not isinstance(steps[0], list):
        return None
    logprobs = {
        entry[1]: entry[0]
        for entry in steps[0]
        if isinstance(entry, list) and len(entry) >= 2 and isinstance(entry[0], float)
    }
    if not all(token in logprobs for token in ids):
        return None
    return float(logprobs[ids[0]]) - float(logprobs[ids[1]])
