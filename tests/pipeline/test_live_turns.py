"""Conversations of watched rollouts ride on heartbeats: what is new, while somebody watches, bounded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rollyard_crds.lease import MAX_LIVE_TEXT, LiveTurn
from rollyard_crds.task import Message
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.tool_parsers.base import ParsedCall, ParsedTurn
from rollyard_pipeline.trajectories.episode import MAX_ARGUMENTS, Episode, turns_from
from rollyard_pipeline.worker.heartbeat import MAX_BYTES, MAX_ROLLOUT_BYTES, LiveTurnsToSend
from rollyard_testing.pipeline.workerlab import Plane, Steered, lease, spec, working
from rollyard_testing.waiting import eventually


def episode() -> Episode:
    """Return a conversation of a prompt, a call, its result and an answer."""
    made = Episode(messages=[Message(role="user", content="count")])
    call = ParsedCall("bash", {"command": "x" * 10_000})
    made.add_assistant("I call it", ParsedTurn("I call it", (call,)), "stop", 1.5)
    made.add_observation(call, "y" * 10_000, None, 0.1)
    made.add_assistant("done", ParsedTurn("done", ()), "stop", 0.5)
    return made


def held(number: int, turns: Any = None) -> HeldLease:
    made = HeldLease(lease(number, "run"))
    made.live = turns
    return made


def test_a_conversation_is_cut_and_says_how_long_it_is() -> None:
    turns = turns_from(episode(), 0)
    assert [turn.no for turn in turns] == [0, 1, 2, 3]
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant"]
    assert (len(turns[2].text), turns[2].characters) == (MAX_LIVE_TEXT, 10_000)
    (call,) = turns[1].tool_calls
    assert (call.name, len(call.arguments)) == ("bash", MAX_ARGUMENTS)
    assert [turn.no for turn in turns_from(episode(), 3)] == [3]
    assert turns_from(episode(), 4) == []


def test_the_turns_belong_to_the_last_messages_of_the_policy() -> None:
    """The task itself may hold messages of an assistant, which nobody has sampled."""
    before = [Message(role=role, content=role) for role in ("user", "assistant", "user")]
    talk = Episode(messages=[*before, *episode().messages], turns=episode().turns)
    talk.turns[0].end, talk.turns[1].start, talk.turns[1].end = 7, 9, 12
    for turn, seconds in zip(talk.turns, (1.5, 0.5), strict=True):
        turn.model_seconds = seconds
    shown = [(turn.no, turn.role, turn.tokens, turn.seconds) for turn in turns_from(talk, 1)]
    assert shown == [
        (1, "assistant", 0, 0.0), (2, "user", 0, 0.0), (3, "user", 0, 0.0), (4, "assistant", 7, 1.5),
        (5, "tool", 0, 0.0), (6, "assistant", 3, 0.5),
    ]  # fmt: skip


def test_only_watched_rollouts_send_and_only_what_is_new() -> None:
    talk, sending = episode(), LiveTurnsToSend()
    item = held(1, lambda first: turns_from(talk, first))
    assert sending.take([item]) == []
    sending.answered([], ["r1"])
    assert sending.watched
    (sent,) = sending.take([item])
    assert [turn.no for turn in sent.turns] == [0, 1, 2, 3]
    assert sending.take([item]) == [sent], "a heartbeat that was lost is sent again"
    sending.answered([sent], ["r1"])
    assert sending.take([item]) == []
    talk.add_user("and now?")
    (more,) = sending.take([item])
    assert [turn.no for turn in more.turns] == [4]
    sending.answered([more], [])
    assert not sending.watched
    talk.add_user("nobody listens")
    assert sending.take([item]) == []
    sending.answered([], ["r1"])
    assert [turn.no for turn in sending.take([item])[0].turns] == [0, 1, 2, 3, 4, 5]


def test_a_turn_that_is_being_sampled_is_sent_as_it_grows() -> None:
    talk, sending = episode(), LiveTurnsToSend()
    said = ["I th"]

    def turns(first: int) -> list[LiveTurn]:
        running = LiveTurn(no=4, role="assistant", text=said[-1], tokens=len(said[-1]), running=True)
        return [*turns_from(talk, first), *([running] if said[-1] else [])]

    item = held(1, turns)
    sending.answered([], ["r1"])
    (sent,) = sending.take([item])
    assert [(turn.no, turn.running) for turn in sent.turns] == [*((no, False) for no in range(4)), (4, True)]
    sending.answered([sent], ["r1"])
    said.append("I think")
    (more,) = sending.take([item])
    assert [(turn.no, turn.text) for turn in more.turns] == [(4, "I think")]
    sending.answered([more], ["r1"])
    said.append("")
    talk.add_assistant("I think so", ParsedTurn("I think so", ()), "stop", 2.0)
    (whole,) = sending.take([item])
    assert [(turn.no, turn.text, turn.running) for turn in whole.turns] == [(4, "I think so", False)]
    sending.answered([whole], ["r1"])
    assert sending.take([item]) == []


def test_another_attempt_is_sent_from_its_beginning() -> None:
    sending = LiveTurnsToSend()
    sending.answered([], ["r1"])
    item = held(1, lambda first: turns_from(episode(), first))
    sending.answered(sending.take([item]), ["r1"])
    again = HeldLease(item.lease.model_copy(update={"token": item.lease.token + 1}))
    again.live = item.live
    (sent,) = sending.take([again])
    assert (sent.token, sent.turns[0].no) == (item.lease.token + 1, 0)


def test_a_heartbeat_is_bounded() -> None:
    long = [LiveTurn(no=n, role="tool", text="\x01" * MAX_LIVE_TEXT) for n in range(64)]
    sending = LiveTurnsToSend()
    items = [held(number, lambda first: long[first:]) for number in range(200)]
    sending.answered([], [item.lease.rollout for item in items])
    sent = sending.take(items)
    sizes = [len(one.model_dump_json()) for one in sent]
    assert sum(sizes) < 2 * MAX_BYTES
    assert max(sizes) < 2 * MAX_ROLLOUT_BYTES
    sending.answered(sent, [item.lease.rollout for item in items])
    (first, *_) = sending.take(items[:1])
    assert first.turns[0].no > 0, "the rest follows with the next heartbeats"


@pytest.fixture
def handler() -> type[Steered]:
    return type("Watched", (Steered,), {"gate": asyncio.Event(), "entered": []})


async def test_a_worker_sends_turns_of_a_run_that_is_watched(handler: type[Steered]) -> None:
    """The rollout is in the middle of its Run, with the prompt as its only message."""
    plane = Plane(spec())
    plane.watched = ["r1"]
    async with working(plane, handler):
        plane.offer(lease(1, "run"))
        await eventually(lambda: any(beat.live for beat in plane.beats))
        (sent,) = next(beat.live for beat in plane.beats if beat.live)
        assert (sent.rollout, sent.turns[0].no, sent.turns[0].role) == ("r1", 0, "user")
        handler.gate.set()
        await plane.wait_for(1)
