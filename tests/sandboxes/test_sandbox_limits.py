"""Limits bind, as root and as an ordinary user; bombs harm only their own sandbox."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.errors import DiskFull
from rollyard_pipeline.sandboxes.host.cgroups import enforced, find_places
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.pace import patience

_EAT = "/.rollyard/venv/bin/python -c 'b = bytearray(300 << 20); print(len(b))'"


async def test_memory_bomb(kit: Any, isolated: NodeProvider) -> None:
    async with await kit.acquire(isolated, "r-1") as bombed, await kit.acquire(isolated, "r-2") as other:
        code, output = await kit.sh(bombed, _EAT)
        assert code != 0
        assert str(300 << 20) not in output
        assert await isolated.oom_killed(bombed.handle) is ("memory" in enforced(find_places()))
        assert not await isolated.oom_killed(other.handle)
        # The exec server survives the death of its child, and the sandbox keeps working.
        assert await kit.sh(bombed, "echo still here") == (0, "still here")
        assert await kit.sh(other, "echo unharmed") == (0, "unharmed")


@pytest.mark.attack(
    "the sandbox ends for its own memory while it waits for Eval, and is swept before Eval looks at it",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the sweep remembers it in the run folder, for six hours",
)
async def test_a_sweep_remembers_who_used_up_the_memory(
    kit: Any, isolated: NodeProvider, run_dir: Path
) -> None:
    """A sandbox that dies before its Eval comes is removed within seconds, and its control groups with it."""
    async with await kit.acquire(isolated, "r-1") as bombed, await kit.acquire(isolated, "r-2") as other:
        await kit.sh(bombed, _EAT)
        for one in (bombed, other):
            record = SandboxFolder(run_dir).load(one.handle.id)
            os.kill(record.root.pid, signal.SIGKILL)
            await kit.until(lambda record=record: not record.alive())
        assert {bombed.handle.id, other.handle.id} <= set(await isolated.sweep())
        assert await isolated.oom_killed(bombed.handle) is ("memory" in enforced(find_places()))
        assert not await isolated.oom_killed(other.handle)


async def test_commands_have_the_lowest_priority_in_their_control_group(
    kit: Any, isolated: NodeProvider
) -> None:
    """They compete with their exec server there, which must answer however many they are."""
    expected = str(19 if "cpu" in enforced(find_places()) else os.getpriority(os.PRIO_PROCESS, 0))
    show = "/.rollyard/venv/bin/python -c 'import os; print(os.nice(0))'"
    async with await kit.acquire(isolated, "r-1") as sandbox:
        assert await kit.sh(sandbox, show) == (0, expected)
        assert (await sandbox.client.run(["bash", "-c", show])).text().strip() == expected


async def test_kill_everything_inside(kit: Any, isolated: NodeProvider) -> None:
    async with await kit.acquire(isolated, "r-1") as first, await kit.acquire(isolated, "r-2") as other:
        # The exec server is among what it kills: whether an answer comes is not the point.
        with contextlib.suppress(SandboxError):
            await kit.sh(first, "kill -9 -1", timeout=patience(5))
        assert await kit.sh(other, "echo unharmed") == (0, "unharmed")
        await isolated.release(first.handle)
        assert kit.groups_of([first.handle.id]) == []


async def test_cpu_limit_is_set(kit: Any, isolated: NodeProvider) -> None:
    if "cpu" not in enforced(find_places()):
        pytest.skip("no writable cpu control group here")
    async with await kit.acquire(isolated, cpu=0.5) as sandbox:
        values = []
        for group in kit.groups_of([sandbox.handle.id]):
            for name in ("cpu.cfs_quota_us", "cpu.max"):
                if (group / name).exists():
                    values.append((group / name).read_text().split()[0])
        assert values == ["50000"]


async def test_sandboxes_outweigh_one_process(kit: Any, isolated: NodeProvider) -> None:
    places = [place for place in find_places() if "cpu" in place.controllers]
    if not places:
        pytest.skip("no writable cpu control group here")
    async with await kit.acquire(isolated):
        for place in places:
            name, one = ("cpu.shares", 1024) if place.version == 1 else ("cpu.weight", 100)
            assert int((place.path / name).read_text()) >= 4 * one


async def test_request_files_beyond_the_disk_limit(kit: Any, isolated: NodeProvider) -> None:
    with pytest.raises(DiskFull, match=r"sandbox\.files\['big'\].*sandbox\.resources\.disk"):
        await kit.acquire(isolated, disk_bytes=1 << 20, files={"big": "x" * (3 << 20)})
    assert isolated.claimed() == []
