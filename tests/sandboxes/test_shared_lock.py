"""The lock on shared storage has one holder at a time, and none for ever."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes.apptainer.image_cache import shared_lock
from rollyard_testing.pace import patience


async def test_one_after_the_other(tmp_path: Path) -> None:
    path, inside, most, entered = tmp_path / "x.lock", 0, 0, 0

    async def one() -> None:
        nonlocal inside, most, entered
        async with shared_lock(path) as mine:
            assert mine
            inside, entered = inside + 1, entered + 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async with asyncio.timeout(patience(50)):
        await asyncio.gather(*(one() for _ in range(4)))
    assert (most, entered) == (1, 4)
    assert list(tmp_path.iterdir()) == []


async def test_a_dead_holders_lock_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text("node-9 4711 dead\n")
    # The storage's clock counts, not this node's: an hour ahead or behind makes no difference to ages.
    os.utime(path, (time.time() - 60, time.time() - 60))
    async with asyncio.timeout(patience(20)):
        async with shared_lock(path, stale_seconds=30) as mine:
            assert mine
            assert "4711 dead" not in path.read_text()
    assert list(tmp_path.iterdir()) == []


async def test_a_living_holder_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    async with shared_lock(path, stale_seconds=4.0):
        held = path.read_text()
        # This is longer than stale_seconds: only the holder's touching keeps the other away.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7), shared_lock(path, stale_seconds=4.0):
                raise AssertionError("two holders")
        assert path.read_text() == held
    assert list(tmp_path.iterdir()) == []


async def test_nobody_waits_for_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text("another\n")
    async with shared_lock(path, until=lambda: True) as mine:
        assert not mine
    assert path.read_text() == "another\n"


async def test_a_lock_that_was_taken_away_is_not_given_back(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    async with shared_lock(path):
        path.write_text("another\n")  # It was taken over while this process was frozen.
    assert path.read_text() == "another\n"
