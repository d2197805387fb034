"""What somebody finds in a process that stands ready to become a worker: nothing of any job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard.local.fleet import Fleet
from rollyard.local.options import Options
from rollyard.local.supervisor import ready_programs
from rollyard_crds.security.job_token import job_of, job_token
from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.home import Home
from rollyard_drivers.host.ready_processes import ReadyProcesses
from rollyard_drivers.reconcile.plan import Launch, Owner, Workload

SECRET = "ry-worker-the-token-of-all-workers"


@pytest.fixture
async def ready(tmp_path: Path) -> AsyncIterator[tuple[Home, Child]]:
    """Yield a home with tokens, and its ready worker after the imports."""
    home = Home(tmp_path / "h")
    home.make()
    (home.state / "tokens.json").write_text(json.dumps({"worker": SECRET, "admin": SECRET, "driver": SECRET}))
    worker = ready_programs(Options(home=home.root))[0]
    processes = ReadyProcesses(Folders(home.logs, home.pids), [worker])
    keeping = asyncio.create_task(processes.keep())
    (pool,) = processes._pools.values()
    async with asyncio.timeout(60):
        while not (pool.ready and _waits(pool.ready[0].pid)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    yield home, pool.ready[0]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def _waits(pid: int) -> bool:
    """Return whether a process has imported its program and waits for its arguments."""
    here = Path(f"/proc/{pid}")
    return (
        "pydantic_core" in (here / "maps").read_text()
        and (here / "stat").read_text().rsplit(")", 1)[1][1] == "S"
    )


async def test_a_ready_worker_holds_no_token_and_no_connection(ready: tuple[Home, Child]) -> None:
    home, child = ready
    here = Path(f"/proc/{child.pid}")
    for name in ("cmdline", "environ"):
        text = (here / name).read_bytes()
        assert SECRET.encode() not in text
        assert b"--url" not in text
        assert b"--token" not in text
    opened = [os.readlink(here / "fd" / number) for number in os.listdir(here / "fd")]
    assert not [path for path in opened if path.startswith(("socket:", str(home.root)))], opened


async def test_a_policy_cannot_hand_a_job_to_a_ready_worker(ready: tuple[Home, Child]) -> None:
    """Its input is a pipe of the supervisor's alone; there is no socket, file or address to reach it by."""
    _, child = ready
    here = Path(f"/proc/{child.pid}/fd")
    (pipe,) = {os.readlink(here / number) for number in os.listdir(here) if number == "0"}
    assert pipe.startswith("pipe:")
    holders = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for number in os.listdir(entry / "fd"):
                # A descriptor may be closed while it is looked at.
                with contextlib.suppress(OSError):
                    if os.readlink(entry / "fd" / number) == pipe:
                        holders.add(int(entry.name))
    assert holders == {child.pid, os.getpid()}, "the supervisor and the ready worker"


async def test_a_worker_is_handed_the_token_of_its_job_and_no_other(tmp_path: Path) -> None:
    home = Home(tmp_path / "h")
    home.make()
    owner = Owner("RolloutJob", "default", "mine", "u-1")
    tokens = []

    class Started(ReadyProcesses):
        async def start(self, program: str, name: str, arguments: list[str], **given: object) -> Child:  # type: ignore[override]
            file = Path(arguments[arguments.index("--token-file") + 1])
            tokens.append((file.stat().st_mode & 0o777, file.read_text()))
            raise OSError("not needed here")

    none = Started(Folders(home.logs, home.pids), ())
    fleet = Fleet(
        home, Options(home=home.root), "http://127.0.0.1:1", None, lambda: None, none,  # type: ignore[arg-type]
        lambda who: job_token(SECRET, who.namespace, who.name, who.uid),
    )  # fmt: skip
    await fleet._launch(Launch(Workload("w", "stage-worker", owner, stages=("run",))))
    ((mode, token),) = tokens
    assert mode == 0o600
    found = job_of(token, SECRET)
    assert found is not None
    assert (found.name, found.uid) == ("mine", "u-1")
