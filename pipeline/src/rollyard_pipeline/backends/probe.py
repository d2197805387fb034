"""What one backend can do, found out by asking it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import orjson

from rollyard_pipeline.backends.http import Http
from rollyard_pipeline.backends.sglang import SglangGenerate
from rollyard_pipeline.backends.vllm import VllmCompletions, VllmGenerate
from rollyard_pipeline.backends.wire import Adapter, ServedModel
from rollyard_pipeline.errors import BackendMismatch, BackendUnavailable

_PROBE_SECONDS: Final = 10.0
_NO_SUCH_CALL: Final = frozenset({403, 404, 405, 501})
_MODEL_INFO: Final = ("/model_info", "/get_model_info")  # SGLang's; the second is the older name


@dataclass(frozen=True, slots=True)
class Facts:
    """What a backend said about itself."""

    adapter: Adapter
    models: dict[str, ServedModel] | None
    """By name; None where it does not list them."""
    label: str | None
    """Weight version now; None where it does not say."""
    label_path: str | None
    """Where the label is read."""
    says_paused: bool
    """It has `/is_paused`."""

    def limit(self, name: str) -> int | None:
        """Context length of a model in tokens: its own, or its base model's."""
        model = (self.models or {}).get(name)
        if model is not None and model.max_model_len is None and model.parent is not None:
            model = (self.models or {}).get(model.parent)
        return model.max_model_len if model is not None else None


async def probe(http: Http, url: str) -> Facts:
    """Ask a backend what it has. No request samples anything, so a paused backend answers too.

    A call is there if an empty request to it is refused for what it lacks, rather than with 403
    (vLLM without `--enable-scale-out`), 404, 405 or 501.

    Raises:
        BackendUnavailable: no answer, or an error that says nothing about the call.
        BackendMismatch: it has none of the calls that give token ids.
    """
    models = await _models(http, url)
    label_path, label = await _label(http, url)
    if await _has(http, url, VllmGenerate.path):
        adapter: Adapter = VllmGenerate()
    elif label_path in _MODEL_INFO and await _has(http, url, SglangGenerate.path):
        adapter = SglangGenerate()
    elif await _has(http, url, VllmCompletions.path):
        adapter = VllmCompletions()
    else:
        raise BackendMismatch(
            f"{url} has no call with token ids in and out: neither {VllmGenerate.path} (vLLM with "
            f"--enable-scale-out) nor {VllmCompletions.path} nor SGLang's {SglangGenerate.path}"
        )
    try:
        status, _ = await get(http, url + "/is_paused")
    except BackendUnavailable:
        status = 200  # its engine loads weights, say, and answers nothing meanwhile; the rest did answer
    return Facts(adapter, models, label, label_path, says_paused=status == 200)


async def get(http: Http, url: str) -> tuple[int, Any]:
    """Status and JSON (None where it is none) of a call that answers at once.

    Raises:
        BackendUnavailable: no answer within some seconds.
    """
    status, content = await _ask(http, "GET", url, None)
    try:
        return status, orjson.loads(content)
    except orjson.JSONDecodeError:
        return status, None


def label_in(body: object) -> str | None:
    """The weight version in an answer of `/weight_info` or `/model_info`."""
    label = body.get("weight_version") if isinstance(body, dict) else None
    return None if label is None else str(label)


async def _models(http: Http, url: str) -> dict[str, ServedModel] | None:
    status, body = await get(http, url + "/v1/models")
    if status >= 500 or status == 429:
        raise BackendUnavailable(f"{url}/v1/models answered {status}")
    entries = body.get("data") if status == 200 and isinstance(body, dict) else None
    if not isinstance(entries, list):
        return None
    models: dict[str, ServedModel] = {}
    for entry in entries:
        name = entry.get("id") if isinstance(entry, dict) else None
        if isinstance(name, str):
            length, parent, mode = (entry.get(key) for key in ("max_model_len", "parent", "logprobs_mode"))
            models[name] = ServedModel(
                name,
                length if type(length) is int and length > 0 else None,
                parent if isinstance(parent, str) else None,
                mode if isinstance(mode, str) else None,
            )
    return models or None


async def _label(http: Http, url: str) -> tuple[str | None, str | None]:
    """Where the label of the weights is, and the label."""
    for path in ("/weight_info", *_MODEL_INFO):
        status, body = await get(http, url + path)
        if status == 200 and isinstance(body, dict):
            if path == "/weight_info" and (label := label_in(body)) is not None:
                return path, label
            if path in _MODEL_INFO and "model_path" in body:
                return path, label_in(body)
    return None, None


async def _has(http: Http, url: str, path: str) -> bool:
    status, _ = await _ask(http, "POST", url + path, {})
    if status >= 500 and status != 501:
        raise BackendUnavailable(f"{url}{path} answered {status} to a probe")
    return status not in _NO_SUCH_CALL


async def _ask(http: Http, method: str, url: str, body: object) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            status, _, content = await http.request(method, url, body)
    except TimeoutError as error:
        raise BackendUnavailable(f"{url}: no answer within {_PROBE_SECONDS:g} s") from error
    return status, content
