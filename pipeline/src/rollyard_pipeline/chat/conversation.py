"""A conversation as text: what follows a sampled turn, and whether the template rewrites history.

The module is pure and contains no token ids. Let

    R(k)   = the template's rendering before turn k
    R(k+1) = its rendering with turn k as it was sampled, and with the messages that came since

The outside text of turn k+1 is what R(k+1) adds to R(k) + turn k. If R(k+1) does not begin with them, the
template rewrites history, and the whole conversation has to be encoded again.

Some templates refuse a turn's raw text (calls must be structured if results follow) or wrap it (channels).
They are given the parsed turn. Its rendering differs from what was sampled in form only, so it can be used
to find the outside text, which is what follows the turn's end token.

Rendering the whole conversation each time would cost more with every turn. Therefore only the opening and
the latest turns of a long conversation are rendered. All of it is rendered again when a role appears that
has not appeared since the turns that were left out (a user's message causes their thoughts to be stripped),
and whenever the conversation has doubled. If a template rewrites earlier turns for another reason, the next
full rendering detects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage, escaped
from rollyard_pipeline.chat.harmony import split_channels
from rollyard_pipeline.errors import TemplateError

_WINDOW: Final = 3  # The smallest number of turns that are rendered.
_WINDOW_LIMIT: Final = 8  # The largest number of turns that are rendered between two full renderings.


@dataclass(frozen=True, slots=True)
class Rendering:
    """The conversation before the next turn. Its texts may contain `tokenizer.MARK`."""

    text: str
    """The whole text: R(k+1)."""
    outside: str | None
    """What the last turn and the messages since add after the sampled text.

    If it is None, `text` must be encoded again.
    """
    messages: tuple[ChatMessage, ...]
    """The last turn and the messages since, in the form that the template accepted."""
    window: str | None
    """The rendering of the opening and the latest turns, or None if it has yet to be made."""
    whole: bool
    """Whether the template rendered the whole conversation."""


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str
    end: str
    parsed: ChatMessage | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """A turn and the messages that came after it."""

    turn: _Turn
    new: tuple[ChatMessage, ...]
    start: int
    """The index of the turn in the settled messages."""
    before: int = 0
    """The length of the text after which the turn was sampled."""


class Conversation:
    """Messages, and the template's view of them.

    Args:
        chat: The model's chat format.
        messages: The initial messages. Their special tokens come from the author and are kept.
    """

    def __init__(self, chat: ChatFormat, messages: Sequence[ChatMessage]) -> None:
        self._chat = chat
        self._settled = list(messages)
        """The messages in the form that the template accepted. Later ones are in `_turn` and `_new`."""
        self._turn: _Turn | None = None
        self._new: list[ChatMessage] = []
        self._groups: list[_Group] = []
        self._text = ""  # R(k)
        self._first = 0  # The group with which the window begins. 0 stands for the whole conversation.
        self._window: str | None = None
        self._checked = 0  # The number of settled messages at the last full rendering.
        self._formal = chat.wraps  # Whether turns are given in parsed form wherever possible.

    def add(self, message: ChatMessage) -> None:
        """Append a message from outside. Text in it that spells a control token stays text."""
        self._new.append(escaped(message, self._chat.tokenizer.escape))

    def retract(self, count: int) -> None:
        """Take back the last `count` messages from outside, after which nothing was sampled."""
        del self._new[len(self._new) - count :]

    def fork(self, turns: int) -> Conversation | None:
        """Return a conversation that continues after the first `turns` sampled turns of this one.

        The result is None if the template no longer renders what came before them as it was sampled.
        """
        fork = Conversation(self._chat, self._settled)
        fork._groups, fork._formal = self._groups[: turns - 1], self._formal
        if turns > len(self._groups):
            fork._turn, fork._text = self._turn, self._text
        else:
            group = self._groups[turns - 1]
            fork._turn, fork._settled = group.turn, self._settled[: group.start]
            try:
                fork._text = fork._rendered()
            except TemplateError:
                return None
            if len(fork._text) != group.before:
                return None
        fork._checked = len(fork._settled)
        return fork

    def _rendered(self) -> str:
        try:
            return self._chat.render(self._settled)
        except TemplateError:
            if self._formal:
                raise
            self._formalize()
            return self._chat.render(self._settled)

    def structured(self, message: ChatMessage) -> None:
        """Set the parsed form of the last turn."""
        if self._turn is not None:
            self._turn = replace(self._turn, parsed=message)

    def said(self, before: Rendering, text: str, end: str) -> None:
        """Append the turn that was sampled after `before`: its text without its end-of-turn token `end`."""
        shown = len(before.messages)
        if self._turn is not None:
            shown -= 1
            group = _Group(self._turn, tuple(self._new[:shown]), len(self._settled), len(self._text))
            self._groups.append(group)
        self._settled += before.messages
        if before.whole:
            self._checked = len(self._settled)
        del self._new[:shown]
        self._text, self._window = before.text, before.window
        self._turn = _Turn(text, end)
        self._slide()

    def next(self) -> Rendering:
        """Return the conversation before the next turn.

        Raises:
            TemplateError: The template refuses the conversation in every form.
        """
        if self._turn is None:
            messages = (*self._settled, *self._new)
            text = self._chat.render(messages)
            return Rendering(text, None, tuple(self._new), text, True)
        if self._first and not self._look_at_all():
            window = self._windowed(self._turn)
            if window is not None:
                return window
        return self._full(self._turn)

    def _look_at_all(self) -> bool:
        if len(self._settled) >= 2 * self._checked:
            return True
        latest = {message["role"] for message in self._settled[self._groups[self._first].start :]}
        return not latest.issuperset(message["role"] for message in self._new)

    def _slide(self) -> None:
        if len(self._groups) - self._first > _WINDOW_LIMIT:
            self._first = len(self._groups) - _WINDOW
            self._window = None

    def _in_window(self) -> list[ChatMessage]:
        if not self._first:
            return self._settled
        return self._settled[: self._groups[0].start] + self._settled[self._groups[self._first].start :]

    def _windowed(self, turn: _Turn) -> Rendering | None:
        messages = self._in_window()
        try:
            if self._window is None:
                self._window = self._chat.render(messages)
            rendering = self._after(messages, self._window, turn)
        except TemplateError:  # The template may refuse only the gap of omitted turns.
            return None
        if rendering.outside is None:
            return None
        return replace(
            rendering,
            text=self._text + rendering.text[len(self._window) :],
            window=rendering.text,
            whole=False,
        )

    def _full(self, turn: _Turn) -> Rendering:
        try:
            rendering = self._after(self._settled, self._text, turn)
        except TemplateError:
            if self._formal:
                raise
            self._formalize()
            rendering = self._after(self._settled, self._text, turn)
        return replace(rendering, window=None if self._first else rendering.text)

    def _formalize(self) -> None:
        """Give the settled turns in parsed form.

        The template accepted the raw text of turns that called tools, and now refuses what follows from it.
        """
        self._formal = True
        for number, group in enumerate(self._groups):
            form = self._form("parsed", number, group) or self._form("stand-in", number, group)
            if form is not None:
                self._settled[group.start : group.start + len(form)] = form

    def _after(self, messages: list[ChatMessage], before: str, turn: _Turn) -> Rendering:
        """Return what follows `turn`, which was sampled after `messages`, whose rendering is `before`."""
        refused: TemplateError | None = None
        forms = ("parsed", "stand-in", "raw") if self._formal else ("raw", "parsed", "stand-in")
        for form in forms:
            group = _Group(turn, tuple(self._new), 0)
            added = self._form(form, len(self._groups), group)
            if added is None:
                continue
            try:
                text = self._chat.render([*messages, *added])
            except TemplateError as error:
                refused = refused or error
                continue
            outside = _outside(before, turn, text, added[0] if form != "raw" else None)
            if outside is None and form == "raw" and turn.end and text.startswith(before + turn.text):
                whitespace = text[len(before + turn.text) :].lstrip().startswith(turn.end)
                if not whitespace and not self._chat.wraps:
                    # The turn ended with another special token than the template's end of turn, which is part
                    # of its text.
                    turn = _Turn(turn.text + turn.end, "")
                    added = [{"role": "assistant", "content": turn.text}, *self._new]
                    text = self._chat.render([*messages, *added])
                    outside = _outside(before, turn, text, None)
            return Rendering(text, outside, tuple(added), text, True)
        raise refused or TemplateError("the chat template has no form for the last turn")

    def _form(self, form: str, number: int, group: _Group) -> list[ChatMessage] | None:
        """Return turn `number` and the messages after it in the form `form`, or None if there is none."""
        turn, new = group.turn, group.new
        if form == "raw":
            return [{"role": "assistant", "content": turn.text}, *new]
        escape = self._chat.tokenizer.escape
        results = [message for message in new if message["role"] == "tool"]
        parsed = escaped(turn.parsed, escape) if turn.parsed and form == "parsed" else {}
        calls = parsed.get("tool_calls") or []
        if form == "stand-in":
            # The answer to a malformed call must follow a call.
            calls = [_call(result.get("name") or "unknown") for result in results]
        if not calls and (results or form == "stand-in" or not self._chat.wraps):
            return None
        if self._chat.wraps:
            shown: ChatMessage = {"role": "assistant", **split_channels(turn.text, escape, bool(calls))}
        else:
            shown = {"role": "assistant", "content": parsed.get("content") or ""}
        # Mistral's templates require ids of nine characters.
        ids = [f"{number % 1_000_000:06d}{index % 1_000:03d}" for index in range(len(calls))]
        if calls:
            shown["tool_calls"] = [{**call, "id": name} for call, name in zip(calls, ids, strict=True)]
        added, answered = [shown], 0
        for message in new:
            if message["role"] == "tool" and ids:
                message = {**message, "tool_call_id": ids[min(answered, len(ids) - 1)]}
                answered += 1
            added.append(message)
        return added


def _outside(before: str, turn: _Turn, text: str, parsed: ChatMessage | None) -> str | None:
    """Return what follows the sampled turn in `text`, or None if history is rewritten."""
    known = before + turn.text
    if text.startswith(known):
        rest = text[len(known) :]
        if rest.startswith(turn.end):
            return rest[len(turn.end) :]
    if parsed is None or not turn.end or not text.startswith(before):
        return None
    shown, end, rest = text[len(before) :].partition(turn.end)
    unchanged = all(str(parsed.get(part) or "") in shown for part in ("thinking", "content"))
    return rest if end and unchanged else None


def _call(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {}}}
