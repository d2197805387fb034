"""The histories that the harness of a rollout has sent, and where a new one leaves them.

The module is pure: it has no I/O and no clock. Histories form a tree, in which each node is a message after
those above it. A message from outside is the same as another one if its text is. A reply of ours is known by
the ids of its calls, or else by its content, because harnesses change what they repeat: they drop thoughts,
whitespace at the ends and ids, and write arguments again that could not be read or had another form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from rollyard_crds.task import FunctionCall, Message, ToolCall

from rollyard_pipeline.chat.format import ChatMessage
from rollyard_pipeline.gateway.calls import HistoryCall, HistoryMessage, ModelReply, ReplyCall
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.trajectories.sanitize import clean_text, clean_value

_MAX_CONTENT: Final = 1 << 20  # Message has the same limit, in characters.
_MAX_CALLS: Final = 64  # Message has the same limit.
_MAX_NAME: Final = 128
_LEAST_SIZE: Final = 64  # The bytes of a message without any text, with what is recorded of its call.


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A sampled turn as its conversation has it, and as the harness got it."""

    conversation: int
    """The number of the conversation in which it was sampled."""
    turn: int
    """The number of the turn among those of its conversation, from 0."""
    reply: ModelReply
    calls: tuple[ParsedCall, ...]
    """What the calls of `reply` are for the record. The two are parallel."""
    tools: frozenset[str]
    """The names of the tools that were offered."""

    @property
    def empty(self) -> bool:
        """Whether a harness may leave the reply out of its history, because it shows nothing."""
        return not self.reply.calls and not self.reply.text.strip()


@dataclass(slots=True, eq=False)
class HistoryNode:
    """A message after those above it."""

    parent: HistoryNode | None = None
    seen: HistoryMessage | None = None
    """The message as the harness has last sent it. It is None for a reply that no history has had yet."""
    message: Message = field(default_factory=lambda: Message(role="user"))
    """The message as it is recorded."""
    said: SaidTurn | None = None
    """The turn that was sampled here, or None for a message from outside."""
    caller: HistoryNode | None = None
    """A tool's message: the message whose call it answers, if there is one."""
    answers: int = 0
    """The number of this call in its message."""
    depth: int = 0
    """The number of messages up to this one."""
    turns: int = 0
    """The number of sampled turns up to this one."""
    children: list[HistoryNode] = field(default_factory=list)
    users: list[int] = field(default_factory=list)
    """The numbers of the conversations that are about to sample a turn after this message."""

    @property
    def last_turn(self) -> HistoryNode | None:
        """The last sampled turn up to this message, or None."""
        node: HistoryNode | None = self
        while node is not None and node.said is None:
            node = node.parent
        return node

    @property
    def size(self) -> int:
        """About how many bytes the message has in the record."""
        shown = self.seen if self.said is None else self.said.reply
        return 0 if shown is None else _size(shown)

    def after(self, above: HistoryNode | None) -> list[HistoryNode]:
        """Return the nodes from the one after `above` up to this one, in order. None stands for the root."""
        nodes: list[HistoryNode] = []
        node: HistoryNode | None = self
        while node is not None and node is not above and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def calls(self) -> Sequence[HistoryCall | ReplyCall]:
        """Return the calls that an assistant's message makes."""
        if self.said is not None:
            return self.said.reply.calls
        return self.seen.calls if self.seen is not None else ()

    def chat(self) -> ChatMessage:
        """Return the message as a native agent's recorder gets it."""
        if self.message.role == "assistant":
            return self.opening().model_dump(mode="json", exclude_none=True)
        shown: ChatMessage = {"role": self.message.role, "content": self.message.content}
        if self.message.name:
            shown["name"] = self.message.name
        if self.caller is not None and self.caller.said is None:
            shown["tool_call_id"] = self.caller.call_id(self.answers)
        return shown

    def opening(self) -> Message:
        """Return the message with the ids of calls that templates require."""
        if self.message.tool_calls:
            calls = [
                call.model_copy(update={"id": self.call_id(index)})
                for index, call in enumerate(self.message.tool_calls)
            ]
            return self.message.model_copy(update={"tool_calls": calls})
        if self.caller is not None and self.caller.message.tool_calls:
            return self.message.model_copy(update={"tool_call_id": self.caller.call_id(self.answers)})
        return self.message

    def call_id(self, index: int) -> str:
        """Return the id of a call in prompts. Mistral's templates require nine characters."""
        return f"{self.depth % 1_000_000:06d}{index % 1_000:03d}"


class HistoryTree:
    """All histories of one rollout."""

    def __init__(self) -> None:
        self.root = HistoryNode()
        self._ids: dict[str, HistoryNode] = {}

    def match(self, messages: Sequence[HistoryMessage]) -> tuple[list[HistoryNode], int]:
        """Return how far a history is known.

        Returns:
            The nodes that the last known message may be, and the number of known messages. There are several
            nodes if turns that were sampled after the same history are equal.
        """
        nodes, known = [self.root], 0
        for message in messages:
            following: list[HistoryNode] = []
            candidates = [child for node in nodes for child in node.children]
            for child in candidates:  # The loop visits what it appends.
                if message == child.seen or self._same(child, message):
                    following.append(child)
                elif child.said is not None and child.said.empty:
                    candidates += child.children
            if not following:
                break
            nodes, known = following, known + 1
        return nodes, known

    def _same(self, node: HistoryNode, message: HistoryMessage) -> bool:
        if node.said is not None:
            same = message.role == "assistant" and self._same_reply(node, node.said, message)
        else:
            same = node.seen is not None and self._same_outside(node.seen, message)
        # The next history probably repeats it in this form. What is not compared may be of any size.
        if same and _size(message) <= (node.size if node.said is None else 2 * node.size):
            node.seen = message
        return same

    def _same_reply(self, node: HistoryNode, said: SaidTurn, message: HistoryMessage) -> bool:
        reply, text = said.reply, message.text.strip()
        if len(message.calls) != len(reply.calls):
            return False
        same_text = text == reply.text.strip()
        if any(call.id in self._ids for call in message.calls):
            if any(call.id != own.id for call, own in zip(message.calls, reply.calls, strict=True)):
                return False
            same_text = same_text or not text
        return same_text and all(
            _same_call(call, own, said.tools) for call, own in zip(message.calls, reply.calls, strict=True)
        )

    def _same_outside(self, one: HistoryMessage, other: HistoryMessage) -> bool:
        if one.role != other.role or one.text != other.text or len(one.calls) != len(other.calls):
            return False
        if one.call_id != other.call_id and (one.call_id in self._ids or other.call_id in self._ids):
            return False
        if one.name and other.name and one.name != other.name:
            return False
        return all(
            mine.name == call.name and same_arguments(mine.arguments, call.arguments)
            for mine, call in zip(one.calls, other.calls, strict=True)
        )

    def of_ids(self, messages: Iterable[HistoryMessage]) -> HistoryNode | None:
        """Return the last sampled turn whose calls a history repeats, wherever it stands, or None."""
        nodes = (self._ids.get(call.id) for message in messages for call in message.calls)
        return max((node for node in nodes if node is not None), key=lambda node: node.turns, default=None)

    def grow(self, node: HistoryNode, messages: Sequence[HistoryMessage]) -> list[HistoryNode]:
        """Return nodes for new messages from outside after `node`. They are not in the tree yet."""
        nodes: list[HistoryNode] = []
        caller, answered = _open_calls(node)
        for message in messages:
            new = HistoryNode(node, message, depth=node.depth + 1, turns=node.turns)
            if message.role == "assistant":
                new.message = _assistant(message)
                caller, answered = new, set()
            elif message.role == "tool":
                name = message.name
                index = None if caller is None else _answered(message, caller, answered)
                if index is not None and caller is not None:
                    answered.add(index)
                    new.caller, new.answers = caller, index
                    name = caller.calls()[index].name or name
                new.message = Message(
                    role="tool", content=_text(message.text), name=clean_text(name, _MAX_NAME) or None
                )
            else:
                new.message = Message(role=message.role, content=_text(message.text))
            if nodes:
                node.children.append(new)
            nodes.append(new)
            node = new
        return nodes

    def use(self, nodes: Sequence[HistoryNode], tail: HistoryNode, conversation: int) -> None:
        """Put new nodes into the tree, after the last of which a conversation samples its next turn.

        Args:
            nodes: The new nodes.
            tail: The last message, which is the last of `nodes` if there are any.
            conversation: The number of the conversation.
        """
        if nodes and nodes[0].parent is not None:
            nodes[0].parent.children.append(nodes[0])
        tail.users.append(conversation)

    def forget(self, tail: HistoryNode, conversation: int) -> None:
        """Take back `use`. What nothing else follows leaves the tree."""
        tail.users.remove(conversation)
        node = tail
        while node.parent is not None and node.said is None and not node.children and not node.users:
            node.parent.children.remove(node)
            node = node.parent

    def say(self, tail: HistoryNode, message: Message, said: SaidTurn) -> HistoryNode:
        """Append a sampled turn after `tail`, and return its node."""
        tail.users.remove(said.conversation)
        node = HistoryNode(tail, message=message, said=said, depth=tail.depth + 1, turns=tail.turns + 1)
        tail.children.append(node)
        self._ids |= {call.id: node for call in said.reply.calls if call.id}
        return node


def _size(message: HistoryMessage | ModelReply) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in message.calls)
    return _LEAST_SIZE + len(message.text) + len(message.thought) + calls


def _open_calls(node: HistoryNode) -> tuple[HistoryNode | None, set[int]]:
    """Return the assistant's message whose calls may be answered after `node`, and the answered ones."""
    answered: set[int] = set()
    one: HistoryNode | None = node
    while one is not None and one.message.role != "assistant":
        if one.caller is not None:
            answered.add(one.answers)
        one = one.parent
    return one, answered


def _answered(message: HistoryMessage, caller: HistoryNode, answered: set[int]) -> int | None:
    """Return the number of the call that a tool's message answers, by its id, else by name and order."""
    calls = caller.calls()
    repeated = caller.seen.calls if caller.seen is not None else ()
    if message.call_id:
        for form in (calls, repeated):
            for index, call in enumerate(form):
                if call.id == message.call_id and index < len(calls):
                    return index
    rest = [index for index in range(len(calls)) if index not in answered]
    named = [index for index in rest if calls[index].name == message.name]
    return next(iter(named or rest), None)


def _text(text: str) -> str:
    return clean_text(text, _MAX_CONTENT)


def _assistant(message: HistoryMessage) -> Message:
    """Return an assistant's message that was not sampled, as it is recorded and rendered.

    If a call is not an object with a name, the text shows all calls as they are written.
    """
    thought = _text(message.thought) or None
    arguments = [_object(call.arguments) for call in message.calls]
    names = [clean_text(call.name, _MAX_NAME) for call in message.calls]
    if len(names) > _MAX_CALLS or not all(names) or None in arguments:
        written = [f"{call.name} {call.arguments}".strip() for call in message.calls]
        text = "\n".join(part for part in (message.text, *written) if part)
        return Message(role="assistant", content=_text(text), reasoning_content=thought)
    calls = [
        ToolCall(function=FunctionCall(name=name, arguments=fields or {}))
        for name, fields in zip(names, arguments, strict=True)
    ]
    return Message(
        role="assistant", content=_text(message.text), reasoning_content=thought, tool_calls=calls or None
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = clean_value(_parsed(text))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _same_call(call: HistoryCall, own: ReplyCall, tools: frozenset[str]) -> bool:
    """Return whether a harness repeats one of our calls.

    What it cannot read, or no tool's, it may write in another way.
    """
    if own.error or (own.name not in tools and call.name != own.name):
        return True
    return call.name == own.name and same_arguments(call.arguments, own.arguments)


def _parsed(text: str) -> Any:
    return orjson.loads(text) if text.strip() else {}


def same_arguments(one: str, other: str) -> bool:
    """Return whether two texts are equal JSON. Numbers are equal as JavaScript reads them.

    Texts of which one is not JSON are equal if they are but for whitespace at the ends.
    """
    if one == other:
        return True
    try:
        pairs = [(_parsed(one), _parsed(other))]
    except ValueError:
        return one.strip() == other.strip()
    while pairs:
        left, right = pairs.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            if left.keys() != right.keys():
                return False
            pairs += [(left[key], right[key]) for key in left]
        elif isinstance(left, list) and isinstance(right, list):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif _scalar(left) != _scalar(right):
            return False
    return True


def _scalar(value: Any) -> tuple[str, Any]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number", float(value)
    return type(value).__name__, value
