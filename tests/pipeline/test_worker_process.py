"""`python -m rollyard_pipeline` as a process: how it starts, and how it ends when it is asked to."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.host.records import SandboxFolder, SandboxRecord
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

LONGEST_SECONDS = patience(60.0)


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yield a worker whose control plane never answers, and its run folder."""
    folder = tmp_path_factory.mktemp("w")
    (folder / "token").write_text("secret")
    command = [sys.executable, "-m", "rollyard_pipeline", "--url", "http://127.0.0.1:9", "--token-file"]
    command += [str(folder / "token"), "--job", "j", "--concurrency", "init=1,run=1,eval=1"]
    command += ["--sandbox", "process", "--run-dir", str(folder), "--drain-seconds", "1"]
    command += ["--log-level", "debug"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        yield process, folder
    finally:
        process.kill()
        process.wait()


def test_one_that_no_control_plane_answers_ends_when_it_is_asked_to(
    worker: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, folder = worker
    until(lambda: b"no lease" in (folder / "log").read_bytes(), LONGEST_SECONDS)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONGEST_SECONDS) == 0
    assert SandboxFolder(folder).ids() == []


_KEEPS_ONE_WARM = """
import asyncio, sys
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest

async def main():
    provider = open_provider("process", run_dir=sys.argv[1], node="n")
    await provider.start()
    await provider.warm(SandboxRequest.of(SandboxSpec()), 1)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def sandbox_of_a_killed_worker(folder: Path, state: str) -> SandboxRecord:
    """Return the warm sandbox of a process that was killed as soon as its record said `state`."""
    records = SandboxFolder(folder)
    found: list[SandboxRecord] = []

    def seen() -> bool:
        there = [record for name in records.ids() if (record := records.load(name)) is not None]
        found[:] = [record for record in there if state == "starting" or record.state == state]
        return bool(found)

    process = subprocess.Popen([sys.executable, "-c", _KEEPS_ONE_WARM, str(folder)])
    try:
        until(seen, LONGEST_SECONDS)
    finally:
        process.kill()
        process.wait()
    return found[0]


@pytest.mark.parametrize("state", ["starting", "warm"])
async def test_a_worker_killed_meanwhile_leaves_its_warm_sandbox_to_the_next(
    tmp_path_factory: pytest.TempPathFactory, state: str
) -> None:
    folder = tmp_path_factory.mktemp("w")
    record = await asyncio.to_thread(sandbox_of_a_killed_worker, folder, state)
    provider = open_provider("process", run_dir=folder, node="n")
    await provider.start()
    try:
        assert SandboxFolder(folder).load(record.id) is None
        assert record.root is None or not record.alive()
    finally:
        await provider.aclose()
