"""What OpenAI's two protocols share: errors, sampling, and the list of models."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from rollyard_pipeline.gateway.errors import CallError, CallProblem
from rollyard_pipeline.gateway.interface import RolloutGateway
from rollyard_pipeline.gateway.protocols.base import ProviderProtocol
from rollyard_pipeline.gateway.protocols.fields import (
    MAX_LABEL,
    flag_of,
    number_of,
    object_of,
    only,
    text_of,
)

HOSTED_TOOLS: Final = frozenset(
    [
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    ]
)
"""The types of tools that the model is not offered.

They run on the provider's servers, or are called in a form that only the provider's models were trained on,
such as a `custom` tool, whose input is no JSON. Harnesses list them as a matter of course, so that a call
with them is not refused. The model cannot call what it does not see. The turn's record names them under
`tools_left_out`.
"""
_KINDS: Final[dict[CallProblem, tuple[str, str | None]]] = {
    "invalid": ("invalid_request_error", None),
    "unauthorized": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", None),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context": ("invalid_request_error", "context_length_exceeded"),
    "limit": ("invalid_request_error", "rollout_limit_reached"),
    "busy": ("requests", "rate_limit_exceeded"),
    "unavailable": ("server_error", "server_error"),
    "failed": ("server_error", "server_error"),
    "ended": ("invalid_request_error", "rollout_ended"),
}
_NUMBERS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


def error_body(error: CallError) -> dict[str, Any]:
    """Return the body of an error as OpenAI writes it."""
    kind, code = _KINDS[error.problem]
    message = error.message
    if error.problem == "context" and error.tokens is not None:
        # Harnesses recognise an overflow by these words.
        message = (
            f"This model's maximum context length is {error.tokens[1]} tokens. However, your messages "
            f"resulted in {error.tokens[0]} tokens. Please reduce the length of the messages."
        )
    if error.problem == "not_found" and error.param == "model":
        code = "model_not_found"
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


class OpenAIProtocol(ProviderProtocol):
    """What is the same in both protocols: errors and models."""

    def error(self, error: CallError) -> dict[str, Any]:
        """Return the body of an error."""
        return error_body(error)

    def models(self, gateway: RolloutGateway, path: Mapping[str, str]) -> dict[str, Any]:
        """Return the list of models, or one. See `ProviderProtocol.models`."""
        own = {"id": gateway.model, "object": "model", "created": 0, "owned_by": "rollyard"}
        asked = path.get("model")
        if asked is None:
            return {"object": "list", "data": [own]}
        if asked != gateway.model:
            message = f"The model '{asked[:MAX_LABEL]}' does not exist. The model is '{gateway.model}'."
            raise CallError("not_found", message, param="model")
        return own


def asked_of(body: Mapping[str, Any], limits: Collection[str]) -> tuple[dict[str, Any], int | None]:
    """Return the parameters of sampling that a request asks for, and the smallest of its limits of tokens.

    Raises:
        CallError: One is of the wrong type, or out of its bounds.
    """
    asked: dict[str, Any] = {}
    smallest: int | None = None
    for name, (least, most) in _NUMBERS.items():
        if body.get(name) is not None:
            asked[name] = number_of(body[name], name, least, most)
    if body.get("seed") is not None:
        asked["seed"] = number_of(body["seed"], "seed", -(1 << 63), (1 << 63) - 1, whole=True)
    for name in ("reasoning_effort", "verbosity"):
        if body.get(name) is not None:
            asked[name] = text_of(body[name], name, 64)
    for name in limits:
        if body.get(name) is not None:
            asked[name] = tokens = int(number_of(body[name], name, 1, math.inf, whole=True))
            smallest = tokens if smallest is None else min(smallest, tokens)
    return asked, smallest


def refuse_set(body: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Refuse fields that are set, each for its reason. A null, a false and an empty list set nothing.

    Raises:
        CallError: One is set.
    """
    for name, why in refused.items():
        if body.get(name) not in (None, False, []):
            raise CallError("invalid", f"Unsupported parameter: '{name}' {why}", param=name)


def plain_text_format(value: object, param: str) -> None:
    """Refuse a format of the answer other than plain text.

    Raises:
        CallError: It is JSON, or anything else.
    """
    if value is not None and object_of(value, param).get("type") != "text":
        message = (
            f"Unsupported value: '{param}' must be of type 'text', because sampling is not constrained here."
        )
        raise CallError("invalid", message, param=param)


def tools_chosen(choice: object) -> bool:
    """Return whether the model is offered the tools that a request lists.

    Raises:
        CallError: The request forces the model to call a tool, which would change what is sampled.
    """
    if choice not in (None, "auto", "none"):
        message = "Unsupported value: 'tool_choice' must be 'auto' or 'none'. Sampling is not constrained."
        raise CallError("invalid", message, param="tool_choice")
    return choice != "none"


def check_stream_options(body: Mapping[str, Any], known: Collection[str]) -> Mapping[str, Any]:
    """Return `stream_options`, whose fields are booleans.

    Raises:
        CallError: They are wrong, or the call doesn't stream.
    """
    options = body.get("stream_options")
    if options is None:
        return {}
    options = object_of(options, "stream_options")
    only(options, "stream_options", known)
    for name, value in options.items():
        flag_of(value, f"stream_options.{name}")
    if not body.get("stream"):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise CallError("invalid", message, param="stream_options")
    return options
