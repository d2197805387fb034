"""The protocols that the gateway speaks, their paths, and the one in whose form any request is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.anthropic import AnthropicMessages
from rollyard_pipeline.gateway.protocols.base import ProviderProtocol
from rollyard_pipeline.gateway.protocols.google import GoogleGenerateContent
from rollyard_pipeline.gateway.protocols.openai_chat import OpenAIChat
from rollyard_pipeline.gateway.protocols.openai_responses import OpenAIResponses

Wire = Literal["chat", "responses", "anthropic", "google"]
"""OpenAI's two protocols, Anthropic's and Google's."""
Action = Literal["call", "count", "models", "upgrade"]

PROTOCOLS: Final[Mapping[Wire, ProviderProtocol]] = {
    "chat": OpenAIChat(),
    "responses": OpenAIResponses(),
    "anthropic": AnthropicMessages(),
    "google": GoogleGenerateContent(),
}

_SLASHES: Final = re.compile("/{2,}")
_GOOGLES: Final = re.compile(
    r"(?:/v1|/v1beta|/v1alpha)?/models/(?P<model>.+):"
    r"(?P<method>generateContent|streamGenerateContent|countTokens)"
)
_MODELS: Final = re.compile(r"(?:/v1|/v1beta|/v1alpha)?/models(?:/(?P<model>.+))?")
_POSTS: Final[Mapping[str, tuple[Wire, Action]]] = {
    "/chat/completions": ("chat", "call"),
    "/responses": ("responses", "call"),
    "/messages": ("anthropic", "call"),
    "/messages/count_tokens": ("anthropic", "count"),
}
_KNOWN: Final = (
    "POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, "
    "/v1beta/models/MODEL:generateContent, :streamGenerateContent and :countTokens, and GET /v1/models"
)
_MAX_SHOWN: Final = 100  # characters


@dataclass(frozen=True, slots=True)
class Route:
    """What a request asks for."""

    wire: Wire
    action: Action
    path: Mapping[str, str] = field(default_factory=dict)
    """What the path says: `model` and `method`."""


def wire_of(path: str, headers: Mapping[str, str]) -> Wire:
    """Return the protocol that a request speaks as far as can be seen, so that an error has its form.

    Args:
        path: The path of the request.
        headers: The headers by their names in lower case.
    """
    if path.startswith(("/v1beta", "/v1alpha")) or _GOOGLES.fullmatch(path) or "x-goog-api-key" in headers:
        return "google"
    if "/messages" in path or "anthropic-version" in headers or "x-api-key" in headers:
        return "anthropic"
    return "responses" if path.endswith("/responses") else "chat"


def find_route(method: str, path: str, headers: Mapping[str, str]) -> Route:
    """Return what a request asks for.

    OpenAI's and Anthropic's paths begin with `/v1` or not, Google's with `/v1`, `/v1beta`, `/v1alpha` or not,
    as the base URLs of clients differ in this.

    Args:
        method: The HTTP method.
        path: The path without the query, decoded.
        headers: The headers by their names in lower case.

    Raises:
        CallError: There is nothing at this path.
    """
    path = _SLASHES.sub("/", path).rstrip("/")
    if method == "POST":
        if known := _POSTS.get(path.removeprefix("/v1")):
            wire, action = known
            return Route(wire, action, {"method": "count_tokens"} if action == "count" else {})
        if googles := _GOOGLES.fullmatch(path):
            return Route(
                "google", "count" if googles["method"] == "countTokens" else "call", googles.groupdict()
            )
    elif method == "GET":
        if path.removeprefix("/v1") == "/responses" and "upgrade" in headers:
            return Route("responses", "upgrade")
        if models := _MODELS.fullmatch(path):
            model = models["model"]
            return Route(wire_of(path, headers), "models", {} if model is None else {"model": model})
    raise CallError(
        "not_found",
        f"there is nothing at {method[:_MAX_SHOWN]} {path[:_MAX_SHOWN] or '/'}; there is {_KNOWN}",
    )
