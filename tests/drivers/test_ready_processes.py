"""Processes that stand ready: each runs one program once, and those that nobody uses are ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_drivers.host import ready_processes
from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.processes import identify, is_alive
from rollyard_drivers.host.ready_processes import Program, ReadyProcesses
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

MAIN = """
import os, sys, time

def main(arguments=None):
    assert sys.argv[1:] == arguments
    print("ran", os.getpid(), *arguments, os.readlink("/proc/self/fd/0"), flush=True)
    if "stay" in arguments:
        time.sleep(60)
    return len(arguments)

def stand_ready(options, arguments):
    print("prepared", *options, flush=True)
    given = arguments()
    if given is None:
        print("not needed", flush=True)
        return 0
    return main(given)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    for name in ("logs", "pids", "ready_demo"):
        (tmp_path / name).mkdir()
    (tmp_path / "ready_demo" / "__main__.py").write_text(MAIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ready_processes, "REFILL_SECONDS", 0.05)
    return Folders(tmp_path / "logs", tmp_path / "pids")


@pytest.fixture
async def ready(folders: Folders) -> AsyncIterator[ReadyProcesses]:
    made = ReadyProcesses(folders, [Program("ready_demo", ("a_module_that_is_not_there",), 2)])
    keeping = asyncio.create_task(made.keep())
    yield made
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def waiting(folders: Folders) -> list[Path]:
    return sorted(folders.pids.glob("ready-ready_demo-*.json"))


def said(folders: Folders, name: str) -> list[str]:
    return (folders.logs / f"{name}.log").read_text().split()


async def test_a_ready_process_becomes_the_program_under_its_own_name(
    ready: ReadyProcesses, folders: Folders
) -> None:
    await eventually(lambda: len(waiting(folders)) == 2)
    ended = asyncio.Event()
    child = await ready.start("ready_demo", "one", ["a", "b c"], on_exit=ended.set)
    await asyncio.wait_for(ended.wait(), patience(30))
    assert said(folders, "one") == ["ran", str(child.pid), "a", "b", "c", "/dev/null"]
    assert (child.name, child.exit_code) == ("one", 2)
    assert not (folders.pids / "one.json").exists()
    await eventually(lambda: len(waiting(folders)) == 2)


async def test_a_program_with_options_prepares_before_it_is_used(folders: Folders) -> None:
    made = ReadyProcesses(folders, [Program("ready_demo", ("json",), 1, ("--home", "/h"))])
    keeping = asyncio.create_task(made.keep())
    (pool,) = made._pools.values()
    await eventually(lambda: pool.ready and pool.ready[0].last_line == "prepared --home /h")
    child = await made.start("ready_demo", "one", ["a"])
    assert await child.wait(patience(30))
    assert said(folders, "one") == ["ran", str(child.pid), "a", "/dev/null"]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_each_process_is_used_once_and_a_fresh_one_follows_when_none_is_ready(
    ready: ReadyProcesses, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_processes, "REFILL_SECONDS", 60.0)
    await eventually(lambda: len(waiting(folders)) == 2)
    children = [await ready.start("ready_demo", f"n{number}", ["stay"]) for number in range(3)]
    assert len({child.pid for child in children}) == 3
    assert waiting(folders) == []
    await eventually(lambda: all(child.last_line.startswith("ran") for child in children))
    for child in children:
        assert (folders.pids / f"{child.name}.json").is_file()
        child.kill_group()
        assert await child.wait(patience(10))
        assert child.exit_code == -signal.SIGKILL


async def test_a_ready_process_that_was_killed_is_not_used_and_is_replaced(
    ready: ReadyProcesses, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_processes, "_AGAIN", ready_processes.Backoff(first=0.05, longest=0.05))
    await eventually(lambda: len(waiting(folders)) == 2)
    (pool,) = ready._pools.values()
    killed = pool.ready[0]
    killed.kill_group()
    await eventually(lambda: killed not in pool.ready and len(pool.ready) == 2)
    child = await ready.start("ready_demo", "one", [])
    assert child.pid != killed.pid
    assert await child.wait(patience(10))
    assert child.exit_code == 0


async def test_variables_need_a_fresh_process(ready: ReadyProcesses, folders: Folders) -> None:
    await eventually(lambda: len(waiting(folders)) == 2)
    before = waiting(folders)
    child = await ready.start("ready_demo", "one", [], env={"A": "b"})
    assert await child.wait(patience(30))
    assert child.exit_code == 0
    assert waiting(folders) == before


async def test_without_programs_every_start_is_a_fresh_one(folders: Folders) -> None:
    none = ReadyProcesses(folders, [Program("ready_demo", count=0)])
    child = await none.start("ready_demo", "one", ["x"])
    assert await child.wait(patience(30))
    assert (child.exit_code, said(folders, "one")[2]) == (1, "x")


async def test_a_replacement_waits_until_the_program_is_started_again(folders: Folders) -> None:
    made = ReadyProcesses(folders, [Program("ready_demo", first_after=3600.0)])
    keeping = asyncio.create_task(made.keep())
    try:
        first = await made.start("ready_demo", "one", ["x"])
        assert await first.wait(patience(30))
        assert waiting(folders) == []
        second = await made.start("ready_demo", "two", ["x"])
        await eventually(lambda: len(waiting(folders)) == 1)
        assert await second.wait(patience(30))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_what_follows_the_first_use_waits_until_the_program_is_started_again(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, pauses = ready_processes._quiet, []

    async def noted(pool: Any, seconds: float) -> None:
        pauses.append(seconds)
        await quiet(pool, seconds)

    monkeypatch.setattr(ready_processes, "_quiet", noted)
    made = ReadyProcesses(folders, [Program("ready_demo", second_after=3600.0)])
    keeping = asyncio.create_task(made.keep())
    try:
        await eventually(lambda: len(waiting(folders)) == 1)
        first = await made.start("ready_demo", "one", ["x"])
        assert await first.wait(patience(30))
        await eventually(lambda: 3600.0 in pauses)
        assert waiting(folders) == []
        second = await made.start("ready_demo", "two", ["x"])
        await eventually(lambda: len(waiting(folders)) == 1)
        third = await made.start("ready_demo", "three", ["x"])
        await eventually(lambda: len(waiting(folders)) == 1)
        assert await second.wait(patience(30))
        assert await third.wait(patience(30))
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_the_pause_after_the_first_use_delays_no_replacement_of_one_that_dies(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_processes, "_AGAIN", ready_processes.Backoff(first=0.05, longest=0.05))
    made = ReadyProcesses(folders, [Program("ready_demo", count=2)])
    keeping = asyncio.create_task(made.keep())
    (pool,) = made._pools.values()
    try:
        await eventually(lambda: len(pool.ready) == 2)
        first = await made.start("ready_demo", "one", ["x"])
        assert await first.wait(patience(30))
        await eventually(lambda: len(pool.ready) == 2)
        monkeypatch.setattr(ready_processes, "_quiet", lambda pool, seconds: asyncio.sleep(3600))
        killed = pool.ready[0]
        killed.kill_group()
        await eventually(lambda: killed not in pool.ready and len(pool.ready) == 2)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_those_that_nobody_uses_end_with_their_keeper(folders: Folders) -> None:
    made = ReadyProcesses(folders, [Program("ready_demo", count=3)])
    keeping = asyncio.create_task(made.keep())
    (pool,) = made._pools.values()
    await eventually(lambda: len(pool.ready) == 3)
    identities = [identify(child.pid) for child in pool.ready]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert not any(identity is not None and is_alive(identity) for identity in identities)
    assert list(folders.pids.iterdir()) == []


@pytest.mark.parametrize(
    ("prepared", "line", "said"),
    [([], b"", b""), ([], b'["half a line"', b""), (["--", "x"], b"", b"prepared x\nnot needed\n")],
)
async def test_a_process_that_gets_no_arguments_runs_nothing(
    folders: Folders, prepared: list[str], line: bytes, said: bytes
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_drivers.host.ready_process", "ready_demo", *prepared),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    async with asyncio.timeout(patience(30)):
        output, _ = await process.communicate(line)
    assert (process.returncode, output) == (0, said)


@pytest.mark.attack(
    "another process hands it a job, or hands it a second one",
    boundary="worker",
    surface="ready worker",
    stopped_by="it reads one line from a pipe that only the supervisor holds, and ends with its program",
)
async def test_a_second_hand_over_is_refused(folders: Folders) -> None:
    child = await Child.start(
        "ready", ["-m", "rollyard_drivers.host.ready_process", "ready_demo"], folders, waits=True
    )
    assert await child.hand_over("one", ["stay"], folders, lambda: None)
    assert not await child.hand_over("two", [], folders, lambda: None)
    assert not (folders.pids / "two.json").exists()
    await eventually(lambda: child.last_line.startswith("ran"))
    child.kill_group()
    assert await child.wait(patience(10))
