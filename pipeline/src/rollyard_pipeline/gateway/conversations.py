"""The conversations of one rollout whose harness calls the gateway, and their record.

The module is pure: it has no I/O and no clock. A call that continues a conversation where its last reply
ended appends to it, as a native agent's turn does. Every other one begins a conversation. Where it shares
sampled turns with another conversation, its prompt begins with their ids, outside the loss mask. Each sampled
token is thus in the mask at most once, in the conversation in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard_crds.trajectory import MAX_BRANCHES, ConversationKind, FinishReason, Turn, TurnToolCall

from rollyard_pipeline.chat.format import ChatFormat
from rollyard_pipeline.gateway.branches import ConversationsRecord, HarnessConversation, afresh
from rollyard_pipeline.gateway.calls import HistoryMessage, ModelCall, ModelReply
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.history import HistoryNode, HistoryTree, SaidTurn
from rollyard_pipeline.gateway.origins import (
    Origin,
    asks_for_summary,
    asks_for_title,
    claimed_kind,
    origin_of,
)
from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import Prompt, Sample
from rollyard_pipeline.trajectories.sanitize import clean_text

_MAX_ERROR: Final = 1024
"""The largest number of characters of the error of a call that are recorded."""
MAX_RECORD_BYTES: Final = 32 << 20
"""The largest size of what the calls of a rollout add to its record, in bytes. The control plane takes twice
as much."""


@dataclass(slots=True, eq=False)
class Placed:
    """A call at its place in a conversation, before anything is sampled for it."""

    conversation: HarnessConversation
    prompt: Prompt
    turn: int
    """The number of the turn, from which its seed is derived. Main conversations count together."""
    opened: bool
    """Whether the prompt opens a segment after the first one of its conversation."""
    unmatched: bool
    """Whether the history is not one that the gateway has seen, so that a conversation was begun."""
    tail: HistoryNode
    """The message after which the turn is sampled."""
    size: int
    """What the call adds to the record, in bytes, as `_size` estimates it."""
    added: int = 0
    """How many messages were appended to a conversation that had begun before."""
    calls: int = 0
    """How many of them are results of its last turn's calls."""
    seconds: float = 0.0
    """How long these calls took."""
    demoted: HarnessConversation | None = None
    """The conversation that is no longer the main one because of this one."""
    text: str | None = None
    """The text of the turn once it is recorded."""

    @property
    def tokenized(self) -> int:
        """The number of tokens of the prompt that were tokenized for it."""
        return len(self.prompt.ids) - self.prompt.known


class Conversations:
    """The conversations of one rollout.

    Args:
        episode: The rollout's own episode. Its messages, turns and recorder are always those of the main
            conversation in which a turn was last sampled.
        trained: The kinds of conversations whose sampled tokens are in the loss mask.
    """

    def __init__(self, episode: Episode, trained: frozenset[str]) -> None:
        self._episode = episode
        self._before = (episode.messages, episode.turns, episode.recorder)
        self._trained = trained
        self._tree = HistoryTree()
        self._all: dict[int, HarnessConversation] = {}
        self._own: HarnessConversation | None = None
        self._size = 0
        """The size of what calls have added to the record, as `_size` estimates it."""
        self._first = 0
        """The number of the first conversation of this step."""
        self._task = next((one.content.strip() for one in episode.messages[::-1] if one.role == "user"), "")

    def next_step(self, text: str = "") -> None:
        """Begin a further step of the rollout, in which the harness runs again.

        What it begins has nothing to do with the conversations so far, unless they share a history.

        Args:
            text: What the step is about.
        """
        self._first, self._task = self._next_number(), text.strip()

    def kinds(self) -> list[ConversationKind]:
        """Return the kind of each conversation."""
        return [one.kind for one in self._all.values()]

    def place(self, call: ModelCall, chat: ChatFormat, now: float = 0.0) -> Placed:
        """Append a call to the conversation that it continues, or begin one, and make its prompt.

        Args:
            chat: The chat format with the tools of the call.
            now: The time in seconds, by any clock.

        Raises:
            CallError: There are too many conversations, the record would become too large, or the chat
                template refuses the history. Nothing is changed.
        """
        placed = self._placed(call, chat, now)
        self._size += placed.size
        if self._size > MAX_RECORD_BYTES:
            self.abandon(placed)
            raise CallError(
                "limit",
                f"the record of the rollout would have more than {MAX_RECORD_BYTES >> 20} MiB: send fewer or "
                "shorter histories that do not continue a conversation",
            )
        return placed

    def _placed(self, call: ModelCall, chat: ChatFormat, now: float) -> Placed:
        if not call.messages:
            raise CallError("invalid", "a call needs at least one message")
        nodes, known = self._tree.match(call.messages)
        rest = call.messages[known:]
        if rest:
            for node in nodes:  # An empty reply may have been left out. The loop visits what it appends.
                nodes += [child for child in node.children if child.said is not None and child.said.empty]
        node = nodes[0] if len(nodes) == 1 else max(nodes, key=lambda one: self._preference(one, rest, chat))
        last = node.last_turn
        between = node.after(last)
        after = [one.seen for one in between if one.seen is not None] if last is not None else []
        continued = self._continued(node, rest, chat)
        claimed = claimed_kind(call.marks)
        quoted = continued is not None and continued.kind == "compaction"
        if claimed is None and self._all and not quoted and asks_for_summary([*after, *rest]):
            claimed = "compaction"
        if continued is not None and claimed in (None, continued.kind):
            placed = self._append(continued, node, between, rest, now, claimed)
            if placed is not None:
                return placed
        return self._begin(call, chat, node, rest, claimed)

    def record(self, placed: Placed, sample: Sample) -> str:
        """Record what was sampled, and return the turn's text; see `TrajectoryRecorder.record`."""
        conversation = placed.conversation
        placed.text = conversation.recorder.record(placed.prompt, sample)
        if conversation.kind == "main":
            self._show(conversation)
        return placed.text

    def add(
        self,
        placed: Placed,
        text: str,
        parsed: ParsedTurn,
        finish: FinishReason,
        model_seconds: float = 0.0,
        asked: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Append the recorded turn to the messages; see `Episode.add_assistant`.

        Args:
            asked: The parameters of sampling that the harness asked for.
        """
        conversation = placed.conversation
        conversation.episode.add_assistant(text, parsed, finish, model_seconds)
        conversation.parsed = parsed.calls
        turn = conversation.episode.turns[-1]
        turn.asked = dict(asked) if asked else None
        return turn

    def sent(self, placed: Placed, reply: ModelReply, now: float = 0.0) -> None:
        """Note what the harness gets, with which later histories are compared.

        Args:
            reply: The reply. Its calls are parallel to those of the parsed turn.
            now: The time in seconds, by the clock of `place`.
        """
        one = placed.conversation
        said = SaidTurn(one.number, len(one.recorder.turns) - 1, reply, one.parsed, one.tools)
        one.last = self._tree.say(placed.tail, one.episode.messages[-1], said)
        one.busy, one.sent = False, now

    def abandon(self, placed: Placed) -> None:
        """Take back a call for which nothing was sampled.

        A turn that is recorded stays, but as the harness has not got it, nothing continues it.
        """
        one = placed.conversation
        if placed.text is not None:
            if len(one.episode.turns) < len(one.recorder.turns):
                turn = one.recorder.turns[-1]
                self.add(placed, placed.text, ParsedTurn(placed.text.strip()), turn.finish_reason)
            return
        self._size -= placed.size
        self._tree.forget(placed.tail, one.number)
        one.begun -= 1
        if one.last is not None:
            self._retract(placed)
            return
        del self._all[one.number]
        for other in self._all.values():
            if other.parent is one:
                other.parent, other.shared = one.parent, min(one.shared, other.shared)
        if placed.demoted is not None:
            placed.demoted.kind, placed.demoted.replaced_by = "main", None
        if self._own is one:
            mains = [other for other in self._all.values() if other.kind == "main"]
            self._show(max(mains, key=lambda other: (bool(other.episode.turns), other.number), default=None))

    def count(self, call: ModelCall, chat: ChatFormat) -> int:
        """Return the number of tokens of the prompt that a call would make, without any effect.

        Raises:
            CallError: The call is refused; see `place`.
        """
        placed = self.place(call, chat)
        self.abandon(placed)
        return len(placed.prompt.ids)

    def add_unanswered(self) -> None:
        """Record the calls of which the harness has sent no results, such as that with which it ends.

        They are those of the last turns of conversations, which nothing continues any more.
        """
        for one in self._all.values():
            turn = one.episode.turns[-1] if one.episode.turns else None
            if turn is not None and not turn.tool_calls:
                turn.tool_calls = [
                    TurnToolCall(name=call.name, arguments=call.arguments, error=call.error)
                    for call in one.parsed
                ]

    def branches(self) -> ConversationsRecord:
        """Return the record of all conversations in which something was sampled."""
        return ConversationsRecord.of(self._own, list(self._all.values()), self._trained)

    def _preference(
        self, node: HistoryNode, rest: Sequence[HistoryMessage], chat: ChatFormat
    ) -> tuple[int, ...]:
        said = None if node.last_turn is None else node.last_turn.said
        continued = self._continued(node, rest, chat) is not None
        return continued, node.turns, -1 if said is None else said.conversation

    def _continued(
        self, node: HistoryNode, rest: Sequence[HistoryMessage], chat: ChatFormat
    ) -> HarnessConversation | None:
        """Return the conversation that a history continues with messages from outside only, or None."""
        last = node.last_turn
        if last is None or last.said is None:
            return None
        one = self._all[last.said.conversation]
        if one.busy or one.last is not last or not one.offers(chat):
            return None
        roles = [other.message.role for other in node.after(last)] + [message.role for message in rest]
        return None if "assistant" in roles else one

    def _append(
        self,
        one: HarnessConversation,
        node: HistoryNode,
        between: Sequence[HistoryNode],
        rest: Sequence[HistoryMessage],
        now: float,
        claimed: ConversationKind | None,
    ) -> Placed | None:
        """Append messages from outside to a conversation, or return None if the template refuses them."""
        grown = self._tree.grow(node, rest)
        new = [*between, *grown]
        prompt = one.extended(new)
        if prompt is None:
            return None
        if claimed is None:
            self._reconsider(one)
        tail = new[-1] if new else node
        self._tree.use(grown, tail, one.number)
        placed = Placed(
            one, prompt, self._turn(one), prompt.outside is None, False, tail, _size(prompt, new), len(new),
        )  # fmt: skip
        one.busy, one.begun = True, one.begun + 1
        one.episode.messages += [added.message for added in new]
        self._add_results(placed, new, max(0.0, now - one.sent) if one.sent else 0.0)
        return placed

    def _reconsider(self, one: HarnessConversation) -> None:
        """Correct the kind of a conversation that continues, as no summary and no title does.

        The policy can make the harness quote a request for a summary. And it can call the gateway by itself
        after the first turn of a harness without tools, which then looks like a title.
        """
        if one.kind == "compaction" and one.shared and one.parent is not None:
            one.kind = one.parent.kind
        elif one.replaced_by is not None:
            for other in self._all.values():
                if other.kind == "main" and other.comes_from(one.replaced_by):
                    other.kind = "other"
            one.kind, one.replaced_by = "main", None
        else:
            return
        if one.kind == "main":
            self._show(one)

    def _add_results(self, placed: Placed, new: Sequence[HistoryNode], seconds: float) -> None:
        """Record the results of the last turn's calls with the turn. They ran at the same time."""
        one = placed.conversation
        results = [added for added in new if added.message.role == "tool"]
        if not results:
            return
        turn = one.episode.turns[-1]
        for result in results:
            own = result.caller is one.last and result.caller is not None and result.answers < len(one.parsed)
            call = one.parsed[result.answers] if own else ParsedCall(result.message.name or "")
            failed = result.seen is not None and result.seen.failed
            error = call.error or (clean_text(result.message.content, _MAX_ERROR) if failed else None)
            part = seconds / len(results)
            turn.tool_calls.append(
                TurnToolCall(name=call.name, arguments=call.arguments, error=error, seconds=part)
            )
        placed.calls, placed.seconds = len(results), seconds
        self._add_seconds(one, turn, seconds)

    def _add_seconds(self, one: HarnessConversation, turn: Turn, seconds: float) -> None:
        turn.tool_seconds += seconds
        if one.kind == "main":  # It waits while sub-agents work.
            self._episode.tool_seconds += seconds

    def _retract(self, placed: Placed) -> None:
        one = placed.conversation
        one.recorder.retract(placed.added)
        del one.episode.messages[len(one.episode.messages) - placed.added :]
        for other in self._all.values():
            if other.parent is one:
                other.shared = min(other.shared, len(one.episode.messages))
        turn = one.episode.turns[-1]
        del turn.tool_calls[len(turn.tool_calls) - placed.calls :]
        self._add_seconds(one, turn, -placed.seconds)
        one.busy = False

    def _begin(
        self,
        call: ModelCall,
        chat: ChatFormat,
        node: HistoryNode,
        rest: Sequence[HistoryMessage],
        claimed: ConversationKind | None,
    ) -> Placed:
        if len(self._all) >= MAX_BRANCHES:
            raise CallError(
                "limit",
                f"the rollout has {MAX_BRANCHES} conversations already, and a history that does not "
                "continue one of them would begin another one",
            )
        sharing = self._sharing(call, node)
        origin = (
            Origin(claimed or sharing.kind, sharing)
            if sharing
            else origin_of(call, claimed, self._of_step(), self._task)
        )
        grown = self._tree.grow(node, rest)
        tail = grown[-1] if grown else node
        whole = [*node.after(None), *grown]
        last = node.last_turn
        forked = None
        if last is not None and last.said is not None:
            owner = self._all[last.said.conversation]
            forked = owner.forked(last.said.turn + 1, [*node.after(last), *grown], chat)
        recorder, prompt = forked or afresh(whole, chat)
        messages = [one.message for one in whole]
        parent = origin.parent
        shared = 0 if parent is None else parent.shared_with(messages)
        one = HarnessConversation(
            number=self._next_number(),
            kind=origin.kind,
            parent=parent,
            shared=shared,
            chat=chat,
            episode=Episode(messages, recorder),
            recorder=recorder,
            title=asks_for_title(call),
            declared=claimed == "main" == origin.kind,
        )
        if origin.demoted is not None:
            origin.demoted.kind = "title" if origin.demoted.title else "other"
            origin.demoted.replaced_by = None if origin.settled else one
        self._tree.use(grown, tail, one.number)
        unmatched = sharing is not None and claimed in (None, sharing.kind)
        size = _size(prompt, whole[shared:])
        placed = Placed(one, prompt, self._turn(one), False, unmatched, tail, size, demoted=origin.demoted)
        self._all[one.number] = one
        one.begun = 1
        if one.kind == "main" and not (self._own and self._own.kind == "main" and self._own.episode.turns):
            self._show(one)
        return placed

    def _of_step(self) -> list[HarnessConversation]:
        return [one for one in self._all.values() if one.number >= self._first]

    def _sharing(self, call: ModelCall, node: HistoryNode) -> HarnessConversation | None:
        """Return the conversation from which a history departs, or None if they have too little in common.

        They share a sampled turn or all messages before the first one, or the history repeats calls of ours
        after other messages.
        """
        last = node.last_turn
        if last is not None and last.said is not None:
            return self._all[last.said.conversation]
        for one in reversed(node.after(None)):
            numbers = one.users + [
                child.said.conversation for child in one.children if child.said is not None
            ]
            if numbers:
                return self._all[min(numbers)]
        repeated = self._tree.of_ids(call.messages)
        return None if repeated is None or repeated.said is None else self._all[repeated.said.conversation]

    def _next_number(self) -> int:
        return max(self._all, default=-1) + 1

    def _turn(self, one: HarnessConversation) -> int:
        if one.kind != "main":
            return one.begun
        return sum(other.begun for other in self._all.values() if other.kind == "main")

    def _show(self, one: HarnessConversation | None) -> None:
        """Make a conversation the rollout's own one."""
        if one is self._own:
            return
        self._own, shown = one, self._episode
        if one is None:
            shown.messages, shown.turns, shown.recorder = self._before
        else:
            shown.messages, shown.turns, shown.recorder = (
                one.episode.messages,
                one.episode.turns,
                one.recorder,
            )


def _size(prompt: Prompt, nodes: Sequence[HistoryNode]) -> int:
    """Return about how many bytes a call adds to the record: its messages, and the prompt of a new segment.

    Messages count by themselves, because the template may leave out most of one.
    """
    return sum(node.size for node in nodes) + (4 * len(prompt.ids) if prompt.outside is None else 0)
