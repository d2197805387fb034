"""Sandboxes outlive their workers, are found again, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import SandboxHandle
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.sandboxes.host.processes import ProcessRef
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider

_WORKER = """
import asyncio, sys
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import SandboxRequest

async def main():
    options = ApptainerOptions(default_image=sys.argv[3] or None)
    provider = open_provider(
        sys.argv[1],
        run_dir=sys.argv[2],
        node="node-a",
        apptainer=options,
        default_image=sys.argv[3] or None,
        templates=False,
    )
    await provider.start()
    request = SandboxRequest(memory_bytes=192 << 20, files={"kept.txt": "kept"}, env={"KEPT": "too"})
    sandbox = await provider.acquire(request, LeaseRef(rollout="r-1", token=1))
    await provider.warm(request, 1)
    while not provider._warm.ready(request.key):
        await asyncio.sleep(0.02)
    print(sandbox.handle.model_dump_json(), flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of all sandboxes that the run dir knows of."""
    folder = SandboxFolder(run_dir)
    records = [record for name in folder.ids() if (record := folder.load(name)) is not None]
    return [
        process.pid
        for record in records
        for process in (record.root, record.monitor, *record.helpers)
        if process
    ]


async def test_outlives_its_killed_worker(
    kit: Any, provider: NodeProvider, run_dir: Path, image_of: Callable[[str], str | None]
) -> None:
    worker = subprocess.Popen(  # noqa: ASYNC220 - its whole life is this test
        [sys.executable, "-c", _WORKER, provider.name, str(run_dir), image_of(provider.name) or ""],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with worker:
        try:
            line = await asyncio.to_thread(worker.stdout.readline)
            handle = SandboxHandle.model_validate(json.loads(line))
            # After Ctrl-C in the worker's terminal comes kill -9: neither reaches the sandbox.
            os.killpg(worker.pid, signal.SIGINT)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
    assert len(SandboxFolder(run_dir).ids()) == 2
    assert provider.claimed() == [handle.id]
    swept = await provider.sweep()
    assert len(swept) == 1, "the dead worker's warm sandbox, and only that"
    assert handle.id not in swept
    async with await provider.attach(handle) as sandbox:
        assert await kit.sh(sandbox, "cat kept.txt; echo $KEPT") == (0, "kepttoo")
        assert sandbox.env == {"KEPT": "too"}
    await provider.release(handle)
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}
    with pytest.raises(SandboxLost, match="is gone"):
        await provider.attach(handle)


async def test_ends_by_itself_when_nobody_renews(kit: Any, provider: NodeProvider, run_dir: Path) -> None:
    sandbox = await kit.acquire(provider)
    await kit.sh(sandbox, "sleep 1000 & disown")
    pids = processes_of(run_dir)
    await sandbox.close()
    await provider.renew([sandbox.handle.id, "0" * 12], 0.3)
    await kit.until(lambda: provider.claimed() == [])
    assert await provider.own_end(sandbox.handle) == ""
    await kit.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(SandboxLost):
        await provider.attach(sandbox.handle)
    assert await provider.sweep() == [sandbox.handle.id]
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}
    assert kit.groups_of([sandbox.handle.id]) == []


@pytest.mark.attack(
    "a bug of the exec server is used to end it, each time that a rollout goes badly",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the first crash of a rollout is an infrastructure failure, which is logged as a bug "
    "(`SandboxCrashed`); from the second one on the rollout scores 0. Where no control group binds the "
    "memory of a sandbox, a server that the kernel ends because the whole node is out of memory counts as "
    "crashed, too",
)
async def test_an_exec_server_that_ends_by_itself_is_told_from_one_that_is_ended(
    kit: Any, provider: NodeProvider, run_dir: Path
) -> None:
    crashed, released = await kit.acquire(provider, "r-1"), await kit.acquire(provider, "r-2")
    assert await provider.own_end("0" * 12) == ""
    await provider.release(released.handle)
    record = SandboxFolder(run_dir).load(crashed.handle.id)
    os.kill(record.root.pid, signal.SIGKILL)
    # A worker that has not renewed the lease does not know whether it has ended.
    other = open_provider(provider.name, run_dir=run_dir, node=crashed.handle.node)
    assert [await one.own_end(crashed.handle) for one in (provider, other)] == ["SandboxCrashed", ""]
    # Where the worker has ended, too, both were probably ended from outside.
    SandboxFolder(run_dir).save(replace(record, worker=ProcessRef(1, 0)))
    assert await provider.own_end(crashed.handle) == ""
    SandboxFolder(run_dir).save(record)
    provider.drain()
    assert await provider.own_end(crashed.handle) == ""
    provider._draining = False
    assert await provider.sweep() == [crashed.handle.id]
    ends = [await provider.own_end(one.handle) for one in (crashed, released)]
    assert ends == ["SandboxCrashed", ""]
    for one in (crashed, released):
        await one.close()


async def test_ten_at_once_leave_nothing_behind(kit: Any, provider: NodeProvider, run_dir: Path) -> None:
    async def one(n: int) -> str:
        async with await kit.acquire(provider, f"r-{n}", env={"N": str(n)}) as sandbox:
            script = "sleep 1000 & disown; (setsid sleep 1000 &); echo $N"
            assert await kit.sh(sandbox, script) == (0, str(n))
            handle = sandbox.handle
        await provider.release(handle)
        await provider.release(handle)
        return str(handle.id)

    seen: list[int] = []

    async def watch() -> None:
        while True:
            seen.extend(processes_of(run_dir))
            await asyncio.sleep(0.05)

    watcher = asyncio.create_task(watch())
    ids = await asyncio.gather(*(one(n) for n in range(10)))
    watcher.cancel()
    assert len(set(ids)) == 10
    assert seen
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}
    assert kit.groups_of(ids) == []
    await kit.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen))


async def test_bubblewrap_starts_at_once_and_keeps_none_warm(
    kit: Any, bubblewrap: NodeProvider, run_dir: Path
) -> None:
    await bubblewrap.warm(SandboxRequest(**kit.SMALL), 2)
    async with await kit.acquire(bubblewrap) as sandbox:
        assert SandboxFolder(run_dir).ids() == [sandbox.handle.id]


async def test_warm_pool(kit: Any, slow: NodeProvider, run_dir: Path) -> None:
    request = SandboxRequest(**kit.SMALL)
    await slow.warm(request, 2)
    await kit.until(lambda: slow._warm.ready(request.key) == 2)
    assert slow.claimed() == []
    warm = set(SandboxFolder(run_dir).ids())
    # Variables and files do not defeat the pool; another limit is another key.
    mine = await kit.acquire(slow, env={"A": "1"}, files={"f": "text"})
    assert mine.handle.id in warm
    assert await kit.sh(mine, "echo $A; cat f") == (0, "1\ntext")
    other = await kit.acquire(slow, processes=65)
    assert other.handle.id not in warm
    assert set(slow.claimed()) == {mine.handle.id, other.handle.id}
    await kit.until(lambda: slow._warm.ready(request.key) == 2)
    for sandbox in (mine, other):
        await sandbox.close()
        await slow.release(sandbox.handle)
    await slow.warm(request, 0)
    await kit.until(lambda: SandboxFolder(run_dir).ids() == [])


async def test_dead_warm_sandbox_is_never_handed_out(kit: Any, slow: NodeProvider, run_dir: Path) -> None:
    request = SandboxRequest(**kit.SMALL)
    await slow.warm(request, 1)
    await kit.until(lambda: slow._warm.ready(request.key) == 1)
    (name,) = SandboxFolder(run_dir).ids()
    pids = processes_of(run_dir)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # Some end with the first.
            os.kill(pid, signal.SIGKILL)
    await kit.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    async with await kit.acquire(slow) as sandbox:
        assert sandbox.handle.id != name
        assert await kit.sh(sandbox, "echo alive") == (0, "alive")


async def test_close_removes_warm_and_keeps_claimed(
    kit: Any, run_dir: Path, isolated: NodeProvider, image_of: Callable[[str], str | None]
) -> None:
    second = kit.open(isolated.name, run_dir, image_of(isolated.name), templates=False)
    await second.start()
    request = SandboxRequest(**kit.SMALL)
    async with await kit.acquire(second) as sandbox:
        handle = sandbox.handle
    await second.warm(request, 1)
    await kit.until(lambda: second._warm.ready(request.key) == 1)
    # While their worker lives, a sweep by another one leaves warm sandboxes alone.
    assert await isolated.sweep() == []
    await second.aclose()
    assert SandboxFolder(run_dir).ids() == [handle.id]
    async with await isolated.attach(handle) as sandbox:
        assert await kit.sh(sandbox, "echo here") == (0, "here")


async def test_cancelled_start_leaves_nothing(kit: Any, provider: NodeProvider, run_dir: Path) -> None:
    for delay in (0.0, 0.005, 0.02, 0.05):
        start = asyncio.create_task(kit.acquire(provider))
        await asyncio.sleep(delay)
        start.cancel()
        result = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(result[0], asyncio.CancelledError):
            await result[0].close()
            await provider.release(result[0].handle)
        assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}


async def test_a_warm_sandbox_that_has_died_is_gone_when_its_worker_ends(
    kit: Any, run_dir: Path, isolated: NodeProvider, image_of: Callable[[str], str | None]
) -> None:
    """Whoever finds it dead leaves its folder to a sweep, and none comes before the end."""
    second = kit.open(isolated.name, run_dir, image_of(isolated.name), templates=False)
    await second.start()
    request = SandboxRequest(**kit.SMALL)
    await second.warm(request, 1)
    await kit.until(lambda: second._warm.ready(request.key) == 1)
    (dead,) = SandboxFolder(run_dir).ids()
    record = SandboxFolder(run_dir).load(dead)
    os.kill(record.root.pid, signal.SIGKILL)
    await kit.until(lambda: not record.alive())
    async with await kit.acquire(second) as sandbox:
        assert sandbox.handle.id != dead
    await second.release(sandbox.handle)
    await second.aclose()
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06, 0.1])
async def test_a_worker_that_ends_while_a_sandbox_starts_leaves_nothing(
    kit: Any, run_dir: Path, isolated: NodeProvider, image_of: Callable[[str], str | None], delay: float
) -> None:
    second = kit.open(isolated.name, run_dir, image_of(isolated.name), templates=False)
    await second.start()
    await second.release((await kit.acquire(second)).handle)  # What starts share is there now.
    await second.warm(SandboxRequest(**kit.SMALL), 3)
    await asyncio.sleep(delay)
    await second.aclose()
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}


async def test_another_nodes_sandbox_is_refused(kit: Any, provider: NodeProvider) -> None:
    async with await kit.acquire(provider) as sandbox:
        elsewhere = sandbox.handle.model_copy(update={"node": "node-b"})
        with pytest.raises(SandboxLost, match="node-b"):
            await provider.attach(elsewhere)


async def test_process_is_loud_and_private(kit: Any, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    provider = open_provider("process", run_dir=run_dir, node=kit.NODE)
    await provider.start()
    assert "bare processes" in caplog.text
    async with await kit.acquire(provider) as sandbox:
        assert (await kit.sh(sandbox, "pwd; echo $HOME"))[1].split() == [sandbox.workdir] * 2
        assert Path(sandbox.workdir).stat().st_mode & 0o777 == 0o700
        assert Path(sandbox.workdir).parent.stat().st_mode & 0o777 == 0o700
    await kit.clean(provider)
