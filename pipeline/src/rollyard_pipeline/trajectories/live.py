"""A conversation that is going on, cut for people who watch it.

The cut texts are sent with heartbeats, so they are bounded, and only what is new is made.
"""

from __future__ import annotations

from typing import Final

import orjson
from rollyard_crds.lease import MAX_LIVE_CALLS, MAX_LIVE_TEXT, MAX_LIVE_TURNS, LiveCall, LiveTurn
from rollyard_crds.task import Message
from rollyard_crds.trajectory import turns_said

from rollyard_pipeline.trajectories.episode import Episode

MAX_ARGUMENTS: Final = 1024
"""The number of characters of a call's arguments that are shown."""


def turns_from(episode: Episode, first: int) -> list[LiveTurn]:
    """Return the messages of an episode from the number `first` on, at most MAX_LIVE_TURNS of them."""
    messages = episode.messages[first : first + MAX_LIVE_TURNS]
    if not messages:
        return []
    turn_of = turns_said([message.role for message in episode.messages], len(episode.turns))
    return [_turn(episode, first + place, message, turn_of) for place, message in enumerate(messages)]


def _turn(episode: Episode, number: int, message: Message, turn_of: dict[int, int]) -> LiveTurn:
    text = message.content if isinstance(message.content, str) else ""
    calls = [
        LiveCall(name=call.function.name[:128], arguments=_arguments(call.function.arguments))
        for call in (message.tool_calls or ())[:MAX_LIVE_CALLS]
    ]
    turn = episode.turns[turn_of[number]] if number in turn_of else None
    return LiveTurn(
        no=number,
        role=message.role,
        text=text[:MAX_LIVE_TEXT],
        characters=len(text),
        tool_calls=calls,
        tokens=0 if turn is None else turn.end - turn.start,
        seconds=0.0 if turn is None else turn.model_seconds,
    )


def _arguments(arguments: object) -> str:
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments, default=str).decode()
    return text[:MAX_ARGUMENTS]
