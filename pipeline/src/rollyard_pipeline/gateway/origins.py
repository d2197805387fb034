"""What a conversation is that begins, as its first call shows it.

A harness says little of its calls, and each harness says it in another way. What is decided here decides
what is trained on, and never what is recorded. The policy may forge all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from rollyard_crds.trajectory import ConversationKind

from rollyard_pipeline.gateway.branches import HarnessConversation
from rollyard_pipeline.gateway.calls import HistoryMessage, Marks, ModelCall, ReplyCall, tool_names

_ASKS_FOR_SUMMARY: Final = (
    "CRITICAL: Respond with TEXT ONLY",  # Claude Code
    "CONTEXT CHECKPOINT COMPACTION",  # Codex
)
_LEAST_ENDING: Final = 16
"""The least number of characters of an argument with which a sub-agent's first message may only end."""
_COMMAND_FIELDS: Final = frozenset({"command", "cmd", "code", "script", "chars"})
"""The arguments of calls that run what the policy writes, as the tools of known harnesses spell them."""
_LEAST_SUMMARY: Final = 32
"""The least number of characters of a last reply which a new history can be known by to continue it."""
_SUMMARY: Final = ("<summary>", "</summary>")
"""The marks between which Claude Code takes the summary out of a reply."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a conversation is, and from where it comes."""

    kind: ConversationKind
    parent: HarnessConversation | None = None
    """The conversation that it leaves, or whose call began it."""
    demoted: HarnessConversation | None = None
    """The conversation that is no longer the main one."""
    settled: bool = False
    """Whether it stays so, even if that one continues."""


def origin_of(
    call: ModelCall,
    claimed: ConversationKind | None,
    conversations: Sequence[HarnessConversation],
    task: str = "",
) -> Origin:
    """Return what a conversation is that shares no history with another one.

    Args:
        call: Its first call.
        claimed: What the harness says that it is.
        conversations: Those that have begun in this step, in their order.
        task: The last text of a user in the task, or an empty string.
    """
    pending = [one for one in conversations if _pending(one, conversations)]
    caller = next((one for one in pending if _begun_by(call, _calls(one))), None)
    mains = [one for one in conversations if one.kind == "main"]
    # The harness waits for commands. They are what calls now, whatever the call says of itself.
    commands = bool(pending) and all(map(_runs_command, [made for one in pending for made in _calls(one)]))
    if claimed is not None and not commands:
        if claimed == "main":
            first = mains[0] if len(mains) == 1 and not mains[0].declared else None
            parent = mains[-1] if mains and first is None else None
            return Origin("main", parent, demoted=first, settled=True)
        parents = {"subagent": caller, "compaction": mains[-1] if mains else None}
        return Origin(claimed, parents.get(claimed))
    if not mains:
        return Origin("main")
    if len(mains) == 1 and not mains[0].declared and not pending:
        plays = any(task in message.text for message in call.messages if message.role == "user")
        helper = all(task not in one.content for one in mains[0].episode.messages if one.role == "user")
        first_ask = call.tools and not mains[0].chat.tools and mains[0].begun <= 1
        settled = bool(task) and plays and helper
        if settled or (first_ask and (plays or helper)):
            return Origin("main", demoted=mains[0], settled=settled)
    if not pending and _begins_with_reply(call, mains[-1]):
        return Origin("main", mains[-1])
    for one in conversations:
        if one.kind == "compaction" and one.reply is not None and _repeats_summary(call, one.reply.text):
            return Origin("main" if one.parent is None else one.parent.kind, one.parent)
    if caller is not None:
        return Origin("subagent", caller)
    if _repeats_transcript(call, mains[-1]):
        return Origin("compaction", mains[-1])
    if asks_for_title(call) and not commands:
        return Origin("title")
    return Origin("policy", pending[-1]) if pending else Origin("other")


def claimed_kind(marks: Marks) -> ConversationKind | None:
    """Return what the harness says that a conversation is, or None."""
    return marks.kind or ("subagent" if marks.agent else None)


def asks_for_summary(messages: Sequence[HistoryMessage]) -> bool:
    """Return whether the last user's message asks for a summary that replaces the history."""
    text = next((message.text for message in reversed(messages) if message.role == "user"), "")
    return any(mark in text for mark in _ASKS_FOR_SUMMARY)


def asks_for_title(call: ModelCall) -> bool:
    """Return whether a call without tools asks for a title."""
    if call.tools:
        return False
    users = [message.text for message in call.messages if message.role == "user"]
    texts = [message.text for message in call.messages if message.role == "system"] + users[-1:]
    return any("title" in text.lower() for text in texts)


def _begun_by(call: ModelCall, calls: Sequence[ReplyCall]) -> bool:
    """Return whether one of the `calls` hands a user's message of this history to a sub-agent.

    A call that runs a command does not, as the command may repeat itself.
    """
    texts = [message.text.strip() for message in call.messages if message.role == "user"]
    for value in _strings([made for made in calls if not _runs_command(made)]):
        part = value.strip()
        if part and any(
            text == part or (len(part) >= _LEAST_ENDING and text.endswith(part)) for text in texts
        ):
            return True
    return False


def _repeats_summary(call: ModelCall, summary: str) -> bool:
    """Return whether a history begins with what a reply has summed up."""
    _, begun, inner = summary.partition(_SUMMARY[0])
    parts = [summary, inner.partition(_SUMMARY[1])[0] if begun else ""]
    texts = [message.text for message in call.messages if message.role != "tool"]
    return any(part.strip() in text for part in parts if part.strip() for text in texts)


def _begins_with_reply(call: ModelCall, other: HarnessConversation) -> bool:
    """Return whether a history begins with the last reply of another one, which summed that up.

    Agents of one's own do so without a word that says it. One that judges a reply has other tools, or none.
    """
    text = other.reply.text.strip() if other.reply is not None and not other.reply.calls else ""
    if len(text) < _LEAST_SUMMARY or not other.tools:
        return False
    return tool_names(call.tools) == other.tools and any(
        text in message.text for message in call.messages if message.role in ("system", "user")
    )


def _repeats_transcript(call: ModelCall, other: HarnessConversation) -> bool:
    """Return whether the last user's message of a call without tools holds another conversation."""
    if call.tools or other.last is None:
        return False
    text = next((message.text for message in reversed(call.messages) if message.role == "user"), "")
    opening = next((one.content.strip() for one in other.episode.messages if one.role == "user"), "")
    if not opening or opening not in text:
        return False
    for node in other.last.after(None):
        if node.said is not None:
            values = [node.said.reply.text, *_strings(node.said.reply.calls)]
            if any(len(value.strip()) > 1 and value.strip() in text for value in values):
                return True
    return False


def _pending(one: HarnessConversation, conversations: Sequence[HarnessConversation]) -> bool:
    """Return whether the harness has yet to answer the calls of a conversation's last reply."""
    if one.busy or one.reply is None or not one.reply.calls:
        return False
    return not any(other.parent is one and other.kind == one.kind for other in conversations)


def _calls(one: HarnessConversation) -> Sequence[ReplyCall]:
    return () if one.reply is None else one.reply.calls


def _runs_command(made: ReplyCall) -> bool:
    """Return whether a tool call runs what the policy has written."""
    try:
        arguments = orjson.loads(made.arguments)
    except ValueError:
        return False
    return isinstance(arguments, dict) and not _COMMAND_FIELDS.isdisjoint(arguments)


def _strings(calls: Sequence[ReplyCall]) -> Iterator[str]:
    """Yield the texts in the arguments of calls."""
    values: list[Any] = []
    for call in calls:
        try:
            values.append(orjson.loads(call.arguments))
        except ValueError:
            continue
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
