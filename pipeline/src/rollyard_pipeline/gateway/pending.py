"""A reply while it is sampled, which several clients may read at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from rollyard_pipeline.gateway.calls import Delta, ModelReply, Opening
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.streaming import GrowingReply

log = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 0.03
"""For how long pieces after the first one are joined, in seconds. Each costs events and system calls."""
_EAGER_LOOKS: Final = 16
"""How often tokens are read as soon as they come while nothing can be shown."""
_TAKEN_BACK: Final = "what was streamed of the reply is not part of it any more: repeat the call"


class SampledReply:
    """A reply that is being sampled, or that was. It implements `interface.PendingReply`.

    Nothing is decoded until a client asks for the pieces.

    Args:
        opening: What is known of the reply now.
        growing: Makes what turns the ids into text.
        since: Returns the ids of the turn so far from the one with a number on, from 0.
    """

    def __init__(
        self, opening: Opening, growing: Callable[[], GrowingReply], since: Callable[[int], Sequence[int]]
    ) -> None:
        self._opening = opening
        self._source: tuple[Callable[[], GrowingReply], Callable[[int], Sequence[int]]] | None
        self._source = growing, since
        self._growing: GrowingReply | None = None
        self._taken_back = False
        self._frozen = False
        """Whether nothing more is shown before the end."""
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        self._more = False
        """Whether tokens have come since the last piece."""
        self._reply: ModelReply | None = None
        self._error: CallError | None = None

    @property
    def opening(self) -> Opening:
        """What is known of the reply now."""
        return self._opening

    @property
    def ended(self) -> bool:
        """Whether there is the whole reply, or an error."""
        return self._ended.is_set()

    async def started(self) -> None:
        """Wait until the first token has come, or the whole reply.

        Raises:
            CallError: There is no reply.
        """
        await self._begun.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def reply(self) -> ModelReply:
        """Wait for the whole reply.

        Raises:
            CallError: The reply cannot be completed.
        """
        await self._ended.wait()
        return self._whole()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield the pieces of the reply from the first one, whenever this is called.

        Raises:
            CallError: The reply cannot be completed, or is not what was streamed.
        """
        thought = text = ""
        if self._source is not None and self._growing is None:
            self._growing = self._source[0]()
            if self._begun.is_set():
                self.progress()
        while True:
            changed = self._changed
            whole = self._whole() if self.ended else None
            source: ModelReply | GrowingReply | None = whole or self._growing
            if whole is None and self._taken_back:
                if thought or text:
                    raise CallError("unavailable", _TAKEN_BACK)
                source = None
            new_thought, new_text = (source.thought, source.text) if source is not None else ("", "")
            late = bool(text) and len(new_thought) > len(thought)
            if late or not (new_thought.startswith(thought) and new_text.startswith(text)):
                raise CallError("unavailable", _TAKEN_BACK)
            pieces = new_thought[len(thought) :], new_text[len(text) :]
            thought, text = new_thought, new_text
            if pieces[0]:
                yield Delta(thought=pieces[0])
            if pieces[1]:
                yield Delta(text=pieces[1])
            if whole is not None:
                for call in whole.calls:
                    yield Delta(call=call)
                return
            await changed.wait()

    def progress(self) -> None:
        """Note that tokens have come. It never raises."""
        self._begun.set()
        if self._growing is None or self._frozen:
            return
        self._more = True
        if self._timer is None:
            self._look()

    def complete(self, reply: ModelReply) -> None:
        """End with the whole reply."""
        self._reply = reply
        self._end()

    def fail(self, error: CallError) -> None:
        """End without the whole reply, unless it has ended."""
        if not self.ended:
            self._error = error
            self._end()

    def _whole(self) -> ModelReply:
        if self._reply is None:
            assert self._error is not None
            raise self._error.with_traceback(None)
        return self._reply

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._source = self._growing = None  # A reply may be kept for long, its prompt need not.
        self._begun.set()
        self._ended.set()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _look(self) -> None:
        """Read the tokens that have come, and let the next ones wait for a while."""
        self._timer = None
        growing, source = self._growing, self._source
        if not self._more or self._frozen or growing is None or source is None:
            return
        self._more = False
        self._looks += 1
        before = len(growing.thought), len(growing.text)
        try:
            if not growing.update(source[1]):
                self._frozen = self._taken_back = True
                self._notify()
                return
        except Exception:
            # The text of the whole reply is made in another way, so only the stream is late.
            log.exception("a reply cannot be streamed")
            self._frozen = True
            return
        shown = len(growing.thought), len(growing.text)
        if shown != before:
            self._notify()
        if shown != (0, 0) or self._looks > _EAGER_LOOKS:
            self._timer = asyncio.get_running_loop().call_later(_JOIN_SECONDS, self._look)
