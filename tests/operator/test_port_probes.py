"""Ports are tried until they answer, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from rollyard_operator.sandboxes.observations import PortProbes
from rollyard_testing.operator.operatorlab import PATIENCE_SECONDS, until


@pytest.fixture
async def told() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def probes(told: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PortProbes]:
    monkeypatch.setattr("rollyard_operator.sandboxes.observations.CONNECT_SECONDS", PATIENCE_SECONDS)
    made = PortProbes(told.set)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def reserved() -> socket.socket:
    """Return a port of this machine on which nothing listens yet."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


async def test_a_port_counts_once_it_takes_connections_and_is_then_left_alone(
    probes: PortProbes, told: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = tries = 0
    connect = probes._connect

    async def counted(host: str, port: int) -> None:
        nonlocal tries
        tries += 1
        await connect(host, port)

    monkeypatch.setattr(probes, "_connect", counted)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal met
        met += 1
        assert await reader.read() == b"", "it says nothing"
        writer.close()

    with reserved() as held:
        probes.want({"a": held.getsockname()})
        await until(lambda: tries > 1)
        assert not probes.has_answered("a")
        async with await asyncio.start_server(meet, sock=held):
            await told.wait()
            assert probes.has_answered("a")
            await asyncio.sleep(0.05)  # Some pauses between tries: nothing tells that there are no more.
    assert met == 1


async def test_what_is_not_wanted_any_more_is_forgotten(probes: PortProbes, told: asyncio.Event) -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    with reserved() as silent, reserved() as held:
        async with await asyncio.start_server(meet, sock=held):
            probes.want({"a": silent.getsockname(), "b": held.getsockname()})
            await told.wait()
            assert (probes.has_answered("a"), probes.has_answered("b")) == (False, True)
            told.clear()
            probes.want({})
            assert not probes.has_answered("b")
            # If it is wanted again, it is tried again.
            probes.want({"b": held.getsockname()})
            await told.wait()
            assert probes.has_answered("b")


async def test_many_that_never_answer_do_not_keep_one_from_being_seen(told: asyncio.Event) -> None:
    async def connect(host: str, port: int) -> None:
        if host != "good":
            raise ConnectionRefusedError

    probes = PortProbes(told.set, connect)
    task = asyncio.create_task(probes.run())
    probes.want({f"bad-{number}": ("bad", 1) for number in range(500)} | {"good": ("good", 1)})
    await told.wait()
    assert probes.has_answered("good")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
