"""What every protocol of the gateway reads and writes: a call of a harness, and the reply to it.

A protocol turns a request's body into a `ModelCall`, and a `ModelReply` into the body or the events of its
answer. All that lies between them knows no protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from rollyard_crds.trajectory import ConversationKind

MAX_CALL_MESSAGES: Final = 20_000
"""The largest number of messages of one call."""
MAX_CALL_TOOLS: Final = 512
"""The largest number of tools of one call."""

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class HistoryCall:
    """A tool call in an assistant's message, as the harness repeats it."""

    id: str
    """The id of the call. It is empty if the protocol, or the harness, has none."""
    name: str
    arguments: str
    """The arguments as the text of a JSON object, or any other text if the model wrote no JSON."""


@dataclass(frozen=True, slots=True)
class HistoryMessage:
    """One message of the history that a harness sends, in no protocol's form."""

    role: Role
    text: str = ""
    thought: str = ""
    """The reasoning that the harness repeats. It is empty if the harness leaves it out."""
    calls: tuple[HistoryCall, ...] = ()
    call_id: str = ""
    """A tool's message: the id of the call that it answers."""
    name: str = ""
    """A tool's message: the name of the tool, if the harness says it."""
    failed: bool = False
    """A tool's message: whether the harness says that the call has failed."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What a harness says of a call beside its history, in headers and the like. All of it may be forged."""

    session: str = ""
    """The id of the harness's session or thread."""
    agent: str = ""
    """The id of a sub-agent."""
    kind: ConversationKind | None = None
    """What the conversation is, if the harness says so."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of a harness: the history, the tools, and how the harness wants it sampled."""

    messages: tuple[HistoryMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """The offered tools as chat templates read them: `{"type": "function", "function": {"name": …,
    "description": …, "parameters": …}}`."""
    stream: bool = False
    max_tokens: int | None = None
    """The most tokens that the harness wants."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The parameters of sampling that the harness asks for, under the names of its protocol. The job's
    `sampling` replaces them, and the record keeps them."""
    model: str = ""
    """The model that the harness names. Every name is answered by the rollout's model."""
    marks: Marks = field(default_factory=Marks)
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only the protocol itself reads again when it writes the answer, such as `stream_options`."""


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call of a reply."""

    id: str
    """The id by which the gateway knows the call again. It is unique within a rollout."""
    name: str
    arguments: str
    """The text of a JSON object. A call that the model wrote wrongly has the text as it was written."""
    error: str = ""
    """Why the call cannot be read, or an empty string if it can. It begins with `MALFORMED_CALL`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens."""

    prompt: int
    sampled: int = 0
    thought: int = 0
    """Those of the sampled tokens that are a thought."""


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The whole reply to one call."""

    id: str
    """A hexadecimal number, which each protocol writes in its own form (`chatcmpl-…`, `msg_…`)."""
    created: int
    """When the call came, in seconds since the epoch."""
    model: str
    text: str
    """The answer without thought and calls."""
    thought: str
    calls: tuple[ReplyCall, ...]
    finish: Finish
    usage: Usage


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of a reply before its first token."""

    id: str
    created: int
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply that is streamed. Exactly one of the three is set.

    The texts of all pieces together are those of the `ModelReply`. Thoughts come before text, and text before
    calls.
    """

    thought: str = ""
    text: str = ""
    call: ReplyCall | None = None


def tool_names(tools: Iterable[Mapping[str, Any]] | None) -> frozenset[str]:
    """Return the names of tools that are offered in the form of `ModelCall.tools`, or none for None."""
    return frozenset(str(tool.get("function", {}).get("name", "")) for tool in tools or ())
