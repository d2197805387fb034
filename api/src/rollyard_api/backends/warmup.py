"""One real request of one token with its log-probability: whether a server samples, not only lives.

`/health` of vLLM only says that the engine's process lives.
"""

from __future__ import annotations

import math
from typing import Any, Final

import httpx
import orjson

from rollyard_api.backends.fetch import NO_SUCH_CALL, Unanswered, base_of, fetch

_PROMPT: Final = [1]
"""Any id that every vocabulary holds."""
_MAX_BYTES: Final = 1 << 20
_SAID: Final = 300  # characters of an error answer that are worth repeating


def _generate(model: str) -> dict[str, Any]:
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}
    return {"model": model, "token_ids": _PROMPT, "sampling_params": sampling, "stream": False}


def _completions(model: str) -> dict[str, Any]:
    asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "return_token_ids": True, "stream": False}
    return {"model": model, "prompt": _PROMPT, **asked}


def _sglang(_model: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    return {"input_ids": _PROMPT, "sampling_params": sampling, "return_logprob": True, "stream": False}


def _of_generate(answer: Any) -> tuple[Any, Any]:
    choice = answer["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def _of_completions(answer: Any) -> tuple[Any, Any]:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def _of_sglang(answer: Any) -> tuple[Any, Any]:
    entries = answer["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


_CALLS: Final = (
    ("/inference/v1/generate", _generate, _of_generate),
    ("/v1/completions", _completions, _of_completions),
    ("/generate", _sglang, _of_sglang),
)
"""As workers ask: the first that the server has."""


async def problem(client: httpx.AsyncClient, url: str, model: str, seconds: float) -> str | None:
    """Why the server does not sample a token with its log-probability; None where it does.

    Args:
        seconds: within which each of the calls must be answered.
    """
    said = ""
    for path, body, read in _CALLS:
        address = base_of(url) + path
        try:
            status, answer = await fetch(
                client, "POST", address, json=body(model), seconds=seconds, limit=_MAX_BYTES
            )
        except Unanswered as error:
            return str(error)
        if status in NO_SUCH_CALL:
            # The call that every server has tells best what is wrong, an unknown model for one.
            if not said or path == "/v1/completions":
                said = f"POST {address} answered {status}: {answer[:_SAID].decode(errors='replace')}"
            continue
        if status != httpx.codes.OK:
            return f"POST {address} answered {status}: {answer[:_SAID].decode(errors='replace')}"
        wrong = _wrong(answer, read)
        if wrong is None:
            return None
        said = f"POST {address}: {wrong}"
        if path != "/v1/completions":  # SGLang has that call too, without token ids
            return said
    return said


def _wrong(answer: bytes, read: Any) -> str | None:
    try:
        ids, logprobs = read(orjson.loads(answer))
    except orjson.JSONDecodeError:
        return "the answer is not JSON"
    except (KeyError, IndexError, TypeError):
        return "the answer holds no token ids with log-probabilities"
    if not isinstance(ids, list) or len(ids) != 1 or type(ids[0]) is not int:
        return f"one token was asked for, token_ids is {str(ids)[:_SAID]}"
    if not isinstance(logprobs, list) or len(logprobs) != 1:
        return f"one log-probability was expected, there is {str(logprobs)[:_SAID]}"
    value = logprobs[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"the log-probability is {value!r}, expected a finite number"
    return None
