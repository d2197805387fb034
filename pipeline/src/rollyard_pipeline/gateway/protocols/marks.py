"""What harnesses say of a call in its headers, whatever its protocol is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

import orjson
from rollyard_crds.trajectory import ConversationKind

from rollyard_pipeline.gateway.calls import Marks
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.protocols.fields import MAX_LABEL

KIND_HEADER: Final = "x-rollyard-conversation"
"""The header with which an agent of one's own says what a conversation is."""


def declared_kind(headers: Mapping[str, str]) -> ConversationKind | None:
    """Return what an agent says of the conversation in a header of ours, or None.

    Raises:
        CallError: It is no kind that an agent can name.
    """
    text = headers.get(KIND_HEADER)
    if text is None:
        return None
    kinds: tuple[ConversationKind, ...] = get_args(ConversationKind)
    for kind in kinds:
        if text == kind != "policy":
            return kind
    names = ", ".join(kind for kind in kinds if kind != "policy")
    message = f"the header X-Rollyard-Conversation must be one of {names}"
    raise CallError("invalid", message, param=KIND_HEADER)


def marks(headers: Mapping[str, str]) -> Marks:
    """Return what an agent of one's own, Codex and opencode say of a call in its headers.

    Codex has a thread within a session for each sub-agent, and `x-codex-turn-metadata` says that a call is a
    compaction. opencode gives a sub-agent a session with a parent.

    Raises:
        CallError: See `declared_kind`.
    """
    declared = declared_kind(headers)
    if declared is not None:
        return Marks(kind=declared)

    def header(name: str) -> str:
        value = headers.get(name, "")
        return value if len(value) <= MAX_LABEL else ""

    session, thread, subagent = header("session-id"), header("thread-id"), header("x-openai-subagent")
    if not session:
        session, parent = header("x-session-id"), header("x-parent-session-id")
        return Marks(parent, session, "subagent") if parent else Marks(session)
    agent = thread if thread not in ("", session) else subagent
    kind: ConversationKind | None = "subagent" if agent else None
    if subagent == "compact" or _request_kind(headers.get("x-codex-turn-metadata", "")) == "compaction":
        kind = "compaction"
    return Marks(session, agent, kind)


def _request_kind(metadata: str) -> object:
    try:
        value = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return None
    return value.get("request_kind") if isinstance(value, dict) else None
