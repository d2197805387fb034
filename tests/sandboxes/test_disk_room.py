"""A run folder on a full disk: nothing of a start is left, and the node says so and continues later."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rollyard_pipeline.sandboxes.errors import (
    ImageNotUsable,
    NodeDiskFull,
    SandboxProviderError,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.host.disk_room import LONGEST_PAUSE_SECONDS, ROOM_BYTES, DiskRoom
from rollyard_pipeline.sandboxes.host.processes import ProcessRef
from rollyard_pipeline.sandboxes.host.records import SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_testing.pace import patience
from rollyard_testing.slurm.fulldisk import fill


@pytest.fixture
def small(folder: Path, missing: Callable[[str], NoReturn]) -> Iterator[Path]:
    """Yield a file system of 12 MiB."""
    point = folder / "d"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(point)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=patience(20))
    if done.returncode != 0:
        missing(f"no file system of its own: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True, timeout=patience(20))


@pytest.fixture
async def provider(kit: Any, small: Path) -> AsyncIterator[NodeProvider]:
    """Yield a provider over a run folder on that file system."""
    made: NodeProvider = kit.open("process", small / "r")
    await made.start()
    yield made
    await kit.clean(made)


async def test_a_full_disk_is_told_and_passes(kit: Any, provider: NodeProvider, small: Path) -> None:
    assert provider.trouble() == ""
    first = await kit.acquire(provider, "r-1")
    filler = small / "filler"
    fill(filler)
    with pytest.raises(NodeDiskFull, match="no room left"):
        await kit.acquire(provider, "r-2")
    assert "node node-a starts no sandboxes" in provider.trouble()
    assert await kit.sh(first, "echo goes on") == (0, "goes on"), "what runs is not touched"
    assert provider.claimed() == [first.handle.id]
    assert provider._folder.ids() == [first.handle.id]
    await provider.release(first.handle)
    filler.unlink()
    assert provider._room.full() == ""
    second = await kit.acquire(provider, "r-3")
    assert await kit.sh(second, "echo again") == (0, "again")
    left = [name for name in os.listdir(small / "r" / "sandboxes") if name.startswith(".new")]
    assert left == []


async def test_a_disk_that_is_full_in_the_middle_of_a_start_leaves_no_process(
    kit: Any, provider: NodeProvider, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ProcessRef] = []
    save = SandboxFolder.save

    def saved(folder: SandboxFolder, record: SandboxRecord) -> None:
        """Fill the disk between the start of the exec server and the note of it."""
        if record.root is not None:
            started.append(record.root)
            fill(small / "filler")
        save(folder, record)

    monkeypatch.setattr(SandboxFolder, "save", saved)
    with pytest.raises(NodeDiskFull):
        await kit.acquire(provider)
    assert len(started) == 1
    assert not started[0].alive()
    assert provider._folder.ids() == []


async def test_nothing_begins_with_the_little_that_ended_sandboxes_leave(
    kit: Any, provider: NodeProvider, small: Path
) -> None:
    """It is enough for a start, but neither lease nor warm pool takes it from those that run."""
    filler = small / "filler"
    fill(filler)
    os.truncate(filler, filler.stat().st_size - ROOM_BYTES // 2)
    assert "node node-a starts no sandboxes" in provider.trouble()
    await provider.warm(SandboxRequest(**kit.SMALL), 1)
    with pytest.raises(NodeDiskFull, match="no room left"):
        await kit.acquire(provider, "r-1")
    # The warm pool may be asking the disk at this moment.
    left = kit.left_behind(small / "r")["folders"]
    assert [name for name in left if not name.startswith(".room-")] == []
    filler.unlink()
    assert provider._room.full() == ""
    assert provider.trouble() == "", "there is room: no pause is left of it"
    first = await kit.acquire(provider, "r-2")
    assert await kit.sh(first, "echo goes on") == (0, "goes on")


async def test_room_that_comes_back_while_the_disk_refuses_leaves_no_pause(
    kit: Any, provider: NodeProvider, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = small / "filler"
    look = provider._room.look

    def looked() -> str:
        full: str = look()
        filler.unlink(missing_ok=True)
        return full

    fill(filler)
    monkeypatch.setattr(provider._room, "look", looked)
    with pytest.raises(NodeDiskFull, match="no room left"):
        await kit.acquire(provider, "r-1")
    assert provider._room.full() == ""
    assert provider.trouble() == ""


@pytest.mark.parametrize("words", [SandboxStartFailed("exit status 255"), ImageNotUsable("no such file")])
async def test_what_fails_on_a_full_disk_fails_for_it_whatever_its_words(
    kit: Any,
    provider: NodeProvider,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: SandboxProviderError,
) -> None:

    async def start(*arguments: object) -> None:
        raise words

    monkeypatch.setattr(provider._starter, "start", start)
    with pytest.raises(type(words)):
        await kit.acquire(provider)
    assert provider.trouble() == ""

    async def fills(*arguments: object) -> None:
        fill(small / "filler")
        raise words

    monkeypatch.setattr(provider._starter, "start", fills)
    with pytest.raises(NodeDiskFull, match=str(words)):
        await kit.acquire(provider)
    assert "no room left" in provider.trouble()
    (small / "filler").unlink()
    assert provider._room.full() == ""
    assert provider.trouble() == ""


def test_pauses_grow_while_starts_fail_and_end_with_one_that_works(tmp_path: Path) -> None:
    now = [100.0]
    room = DiskRoom(tmp_path, lambda: now[0])
    pauses = []
    for _ in range(10):
        room.failed("no room")
        room.failed("no room, said by another start of the same moment")
        begun = now[0]
        while room.trouble():
            assert room.trouble() == "no room"
            now[0] += 1
        pauses.append(now[0] - begun)
    assert pauses[:4] == [2, 4, 8, 16]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    room.worked()
    room.failed("no room")
    now[0] += 1
    assert room.trouble() == "no room"
    now[0] += 1
    assert room.trouble() == ""
    room.failed("no room")
    room.worked()
    assert room.trouble() == "", "a start that works ends the pause"
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_asked_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: asked.append(size))
    now = [0.0]
    room = DiskRoom(tmp_path, lambda: now[0])
    for _ in range(30):
        room.trouble()
        now[0] += 0.1
    assert asked == [ROOM_BYTES] * 3
