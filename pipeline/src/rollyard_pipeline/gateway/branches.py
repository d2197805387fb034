"""The conversations of a rollout whose harness calls the gateway, and what a trajectory says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.task import Message
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import Branch, ConversationKind

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage
from rollyard_pipeline.errors import TemplateError
from rollyard_pipeline.gateway.calls import ModelReply, tool_names
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.history import HistoryNode
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import Prompt, TrajectoryRecorder


@dataclass(slots=True, eq=False)
class HarnessConversation:
    """One conversation of a rollout."""

    number: int
    kind: ConversationKind
    parent: HarnessConversation | None
    """The conversation that it left, or whose call began it."""
    shared: int
    """How many messages at its beginning are those of the parent."""
    chat: ChatFormat
    episode: Episode
    """All of its messages, and the turns that were sampled in it."""
    recorder: TrajectoryRecorder
    title: bool
    """Whether its first call has no tools and asks for a title."""
    declared: bool = False
    """Whether the harness has said that it is the main one."""
    replaced_by: HarnessConversation | None = None
    """The conversation that became the main one in its place, or None."""
    last: HistoryNode | None = None
    """Its last turn, whose reply the harness has got."""
    busy: bool = True
    """Whether a turn of it is being sampled, or its last one was never sent, so that nothing continues it."""
    begun: int = 0
    """The number of turns that were begun in it."""
    parsed: tuple[ParsedCall, ...] = ()
    """The calls of its last turn."""
    sent: float = 0.0
    """When its last reply was sent, in seconds."""

    @property
    def tools(self) -> frozenset[str]:
        """The names of the offered tools."""
        return tool_names(self.chat.tools)

    @property
    def reply(self) -> ModelReply | None:
        """Its last reply that the harness has got, or None."""
        return None if self.last is None or self.last.said is None else self.last.said.reply

    @property
    def recorded_parent(self) -> tuple[HarnessConversation | None, int]:
        """The nearest parent in which something was sampled, and how many messages it shares with it."""
        parent, shared = self.parent, self.shared
        while parent is not None and not parent.episode.turns:
            shared = min(parent.shared, shared)
            parent = parent.parent
        return parent, 0 if parent is None else shared

    def shared_with(self, messages: Sequence[Message]) -> int:
        """Return how many messages at the beginning are the same objects as its own."""
        pairs = zip(messages, self.episode.messages, strict=False)
        return next(
            (index for index, (one, own) in enumerate(pairs) if one is not own),
            min(len(messages), len(self.episode.messages)),
        )

    def comes_from(self, other: HarnessConversation) -> bool:
        """Return whether it is another conversation, or left that one or one that did."""
        one: HarnessConversation | None = self
        while one is not None and one is not other:
            one = one.parent
        return one is other

    def offers(self, chat: ChatFormat) -> bool:
        """Return whether its tools are those of a chat format."""
        return self.chat is chat or list(self.chat.tools or ()) == list(chat.tools or ())

    def extended(self, nodes: Sequence[HistoryNode]) -> Prompt | None:
        """Append messages from outside to the token record, and return the prompt of the next turn.

        The result is None, and nothing is appended, if the chat template refuses them.
        """
        for node in nodes:
            self.recorder.add(_late(node.chat(), self.chat))
        try:
            return self.recorder.prompt()
        except TemplateError:
            self.recorder.retract(len(nodes))
            return None

    def forked(
        self, turns: int, nodes: Sequence[HistoryNode], chat: ChatFormat
    ) -> tuple[TrajectoryRecorder, Prompt] | None:
        """Return the recorder of a history that begins with its first `turns` turns, and its prompt.

        The result is None if other tools are offered, or the template shows the turns in another way now.

        Args:
            nodes: The messages that follow in the history.
            chat: The chat format of the call.
        """
        recorder = self.recorder.fork(turns) if self.offers(chat) else None
        if recorder is None:
            return None
        for node in nodes:
            recorder.add(_late(node.chat(), chat))
        try:
            return recorder, recorder.prompt()
        except TemplateError:
            return None


def afresh(nodes: Sequence[HistoryNode], chat: ChatFormat) -> tuple[TrajectoryRecorder, Prompt]:
    """Return the recorder of a history that the template renders as a whole, and its prompt.

    Raises:
        CallError: The chat template refuses the history.
    """
    recorder = TrajectoryRecorder(chat, [])
    try:
        messages = chat.opening([node.opening() for node in nodes])
        leading = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
        if leading > 1 and not chat.template.has_late_system:
            text = "\n\n".join(one["content"] for one in messages[:leading])
            messages[:leading], leading = [{"role": "system", "content": text}], 1
        for message in messages[:leading]:
            recorder.add(message)
        for message in messages[leading:]:
            recorder.add(_late(message, chat))
        return recorder, recorder.prompt()
    except TemplateError as error:
        raise CallError("invalid", str(error)) from error


def _late(message: ChatMessage, chat: ChatFormat) -> ChatMessage:
    """Return a message that is not the first one as the chat template can show it.

    Harnesses send system messages among others. Templates that know only a first one refuse them, leave them
    out or move them, so that they get them as a user's, in the form in which Claude Code sends its reminders.
    """
    if message["role"] != "system" or chat.template.has_late_system:
        return message
    return {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}


@dataclass(frozen=True, slots=True)
class ConversationsRecord:
    """What a `RunRecord` says of the conversations of a rollout, and their tokens."""

    conversation: int
    continues: int | None
    branches: list[Branch]
    segments: list[PackedSegment]
    """Those of the rollout's own conversation come first."""

    @classmethod
    def of(
        cls,
        own: HarnessConversation | None,
        conversations: Sequence[HarnessConversation],
        trained: frozenset[str],
    ) -> ConversationsRecord:
        """Return the record of the conversations in which something was sampled.

        Args:
            own: The rollout's own conversation, or None if the harness has not called.
            conversations: All of them, in the order of their numbers.
            trained: The kinds of conversations whose sampled tokens are in the loss mask.
        """
        segments = [] if own is None else own.recorder.segments("main" in trained)
        branches: list[Branch] = []
        for one in conversations:
            if one is own or not one.episode.turns:
                continue
            in_mask = one.kind != "policy" and one.kind in trained
            parent, shared = one.recorded_parent
            first = len(segments)
            segments += one.recorder.segments(in_mask)
            turns = [turn.model_copy(update={"segment": first + turn.segment}) for turn in one.episode.turns]
            branches.append(
                Branch(
                    number=one.number,
                    kind=one.kind,
                    trained=in_mask,
                    parent=None if parent is None else parent.number,
                    shared=shared,
                    messages=one.episode.messages[shared:],
                    turns=turns,
                )
            )
        former = None if own is None else own.recorded_parent[0]
        continues = former.number if former is not None and former.kind == "main" else None
        number = max((one.number for one in conversations), default=-1) + 1 if own is None else own.number
        return cls(number, continues, branches, segments)
