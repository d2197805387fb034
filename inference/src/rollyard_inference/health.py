"""Whether a server can be used: it lives, serves the model, and samples.

`/health` of vLLM only says that the engine's process lives, so a first request is made and checked.
"""

from __future__ import annotations

from typing import Final

from rollyard_inference.capabilities import PROBE_SECONDS, probe, renamed_model, served_models, weight_info
from rollyard_inference.errors import BackendMismatch, ModelNotServed
from rollyard_inference.replies import require_ok, sampled
from rollyard_inference.sampling.request import Sampling
from rollyard_inference.transports.interface import Transport, base_url

_PROMPT: Final = (1,)
"""An id that every vocabulary holds."""
_FIRST: Final = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=1, seed=0)
_MAX_BYTES: Final = 1 << 20


async def check_alive(transport: Transport, url: str, seconds: float) -> None:
    """Ask for `/health`.

    Raises:
        BackendError: no answer, or another status than 200.
    """
    address = f"{base_url(url)}/health"
    reply = await transport.request("GET", address, seconds=seconds, limit=_MAX_BYTES)
    require_ok(f"GET {address}", reply)


async def check_model(transport: Transport, url: str, model: str, seconds: float) -> None:
    """Look for a model in `/v1/models`.

    Raises:
        ModelNotServed: it is not among the served ones.
        BackendError: no answer, or no list of models.
    """
    served = await served_models(transport, url, seconds)
    if served is None:
        raise BackendMismatch(f"GET {base_url(url)}/v1/models gave no list of models")
    if model in served:
        return
    if renamed_model(served, await weight_info(transport, url, seconds)) is None:
        raise ModelNotServed(f"the server does not serve {model!r}; it serves: {', '.join(served)}")


async def first_request(transport: Transport, url: str, model: str, seconds: float) -> str | None:
    """Sample one token, as workers do, with every check of its answer.

    Args:
        seconds: for the request; each of the probes before it has `PROBE_SECONDS` at most.

    Returns:
        The label of the weights that sampled it; None where the server does not say.

    Raises:
        BackendError: the server does not sample one token with its log-probability.
    """
    can = await probe(transport, url, min(seconds, PROBE_SECONDS))
    if not can.serves(model):
        raise ModelNotServed(f"the server does not serve {model!r}; it serves: {', '.join(can.models or ())}")
    address = base_url(url) + can.call.path
    body = can.call.body(can.model(model), _PROMPT, _FIRST)
    reply = await transport.request("POST", address, body, seconds=seconds, limit=_MAX_BYTES)
    said = sampled(f"POST {address}", reply)
    try:
        answer = can.call.parse(said, _PROMPT, _FIRST)
    except BackendMismatch as error:
        raise BackendMismatch(f"POST {address}: {error}") from error
    if len(answer.token_ids) != 1:
        raise BackendMismatch(f"POST {address}: one token was asked for, there are {len(answer.token_ids)}")
    label = answer.versions[-1] if answer.versions else answer.label
    return label or can.weights.label


async def weight_label(transport: Transport, url: str, seconds: float) -> str | None:
    """The label of a server's weights; None where it does not say.

    Raises:
        BackendUnavailable: no answer.
    """
    return (await weight_info(transport, url, seconds)).label
