"""Checks of whether a server can be used: it runs, serves the model, and samples.

`/health` of vLLM says only that the process of the engine runs, so a first request is sent and checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rollyard_inference.capabilities import (
    PROBE_SECONDS,
    Capabilities,
    is_prorl,
    probe,
    renamed_model,
    served_models,
    weight_info,
)
from rollyard_inference.errors import BackendMismatch, ModelNotServed
from rollyard_inference.replies import NO_SUCH_CALL, require_ok, sampled
from rollyard_inference.sampling.call import parsed
from rollyard_inference.sampling.request import Answer, Sampling, ServedModel
from rollyard_inference.transports.interface import Transport, base_url

_PROMPT: Final = (1,)
"""A prompt of one id, which every vocabulary contains."""
_FIRST: Final = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1, seed=0)
_MAX_BYTES: Final = 1 << 20


async def check_alive(transport: Transport, url: str, seconds: float) -> None:
    """Request `/health` and check the answer. A server with ProRL's `/generate` need not have that call.

    Raises:
        BackendError: The server did not answer, or answered with a status other than 200.
    """
    address = f"{base_url(url)}/health"
    reply = await transport.request("GET", address, seconds=seconds, limit=_MAX_BYTES)
    if reply.status in NO_SUCH_CALL and await is_prorl(transport, url, seconds):
        return
    require_ok(f"GET {address}", reply)


async def check_model(transport: Transport, url: str, model: str, seconds: float) -> None:
    """Check that `/v1/models` contains a model. A server with ProRL's `/generate` need not list its model.

    Raises:
        ModelNotServed: The model is not among the served ones.
        BackendError: The server did not answer, or did not answer with a list of models.
    """
    served = await served_models(transport, url, seconds)
    if served is None and await is_prorl(transport, url, seconds):
        return
    await _find(served, transport, url, model, seconds)


async def find_model(transport: Transport, url: str, model: str, seconds: float) -> ServedModel:
    """Return what `/v1/models` says of a model, or of the first one if `model` is an empty string.

    Raises:
        ModelNotServed: The model is not among the served ones.
        BackendError: The server did not answer, or did not answer with a list of models.
    """
    return await _find(await served_models(transport, url, seconds), transport, url, model, seconds)


async def _find(
    served: dict[str, ServedModel] | None, transport: Transport, url: str, model: str, seconds: float
) -> ServedModel:
    if served is None:
        raise BackendMismatch(f"GET {base_url(url)}/v1/models gave no list of models")
    if not model or model in served:
        return served[model] if model else next(iter(served.values()))
    renamed = renamed_model(served, await weight_info(transport, url, seconds))
    if renamed is None:
        raise ModelNotServed(f"the server does not serve {model!r}; it serves: {', '.join(served)}")
    return replace(renamed, name=model)


async def first_request(transport: Transport, url: str, model: str, seconds: float) -> str | None:
    """Sample one token in the same way as workers do, with every check of the answer.

    Args:
        transport: Sends the requests.
        url: The base URL of the server.
        model: The name of the model.
        seconds: The time limit of the request. Each of the probes before it may take `PROBE_SECONDS` at most.

    Returns:
        The label of the weights that sampled the token, or None if the server does not say.

    Raises:
        BackendError: The server does not sample one token with its log-probability.
    """
    capabilities = await probe(transport, url, min(seconds, PROBE_SECONDS))
    answer = await first_answer(transport, url, capabilities, model, seconds)
    label = answer.versions[-1] if answer.versions else answer.label
    return label or capabilities.weights.label


async def first_answer(
    transport: Transport, url: str, capabilities: Capabilities, model: str, seconds: float
) -> Answer:
    """Sample one token from a server whose capabilities are known. See `first_request`."""
    if not capabilities.serves(model):
        raise ModelNotServed(
            f"the server does not serve {model!r}; it serves: {', '.join(capabilities.models or ())}"
        )
    address = base_url(url) + capabilities.call.path
    body = capabilities.call.body(capabilities.model(model), _PROMPT, _FIRST)
    reply = await transport.request("POST", address, body, seconds=seconds, limit=_MAX_BYTES)
    document = sampled(f"POST {address}", reply)
    try:
        answer = parsed(capabilities.call, document, _PROMPT, _FIRST)
    except BackendMismatch as error:
        raise BackendMismatch(f"POST {address}: {error}") from error
    if len(answer.token_ids) != 1:
        raise BackendMismatch(f"POST {address}: one token was asked for, there are {len(answer.token_ids)}")
    return answer


async def weight_label(transport: Transport, url: str, seconds: float) -> str | None:
    """Return the label of a server's weights, or None if the server does not say.

    Raises:
        BackendUnavailable: The server did not answer.
    """
    return (await weight_info(transport, url, seconds)).label
