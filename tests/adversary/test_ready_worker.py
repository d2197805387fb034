"""What somebody finds in a process that stands ready to become a worker: nothing of any job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard.local.options import Options
from rollyard.local.supervisor import Fleet, ready_programs
from rollyard_crds.security.job_token import job_of, job_token
from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.home import Home
from rollyard_drivers.host.processes import identify, is_alive
from rollyard_drivers.host.ready_processes import ReadyProcesses
from rollyard_drivers.reconcile.plan import Launch, Owner, Workload
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="worker", surface="ready worker")


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
    await eventually(lambda: pool.ready and _waits(pool.ready[0].pid))
    yield home, pool.ready[0]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def _waits(pid: int) -> bool:
    """Return whether a process has prepared everything and waits for its arguments."""
    here = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        # Its main thread reads from its input: read(0, …) of read(2).
        return (here / "syscall").read_text().split()[:2] == ["0", "0x0"] and bool(_templates(pid))
    return False


def _templates(pid: int) -> list[int]:
    """Return the descendants of a ready worker: bwrap, and the template of sandboxes that it has started."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in _templates(child)]


def _reached(pid: int) -> list[str]:
    """Return the sockets of a process that have an address or a path, by which others may reach it."""
    here = Path(f"/proc/{pid}")
    own = {os.readlink(here / "fd" / number) for number in os.listdir(here / "fd")}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in (here / "net" / table).read_text().splitlines()[1:]:
            found += [line] if f"socket:[{line.split()[9]}]" in own else []
    for line in (here / "net" / "unix").read_text().splitlines()[1:]:
        fields = line.split(None, 7)
        found += [line] if len(fields) == 8 and f"socket:[{fields[6]}]" in own else []
    return found


LOOKING_IN = pytest.mark.attack(
    "whoever looks into a process that stands ready finds a token, or a connection",
    stopped_by="it has none until it gets the arguments of one job, whose token serves that job alone",
)


@LOOKING_IN
async def test_a_ready_worker_holds_no_token_and_no_connection(ready: tuple[Home, Child]) -> None:
    home, child = ready
    here = Path(f"/proc/{child.pid}")
    for name in ("cmdline", "environ"):
        text = (here / name).read_bytes()
        assert SECRET.encode() not in text
        assert b"--url" not in text
        assert b"--token" not in text
    opened = [os.readlink(here / "fd" / number) for number in os.listdir(here / "fd")]
    assert not [path for path in opened if path.startswith(str(home.root))], opened
    assert _reached(child.pid) == []
    assert not (home.run / "sandboxes").exists() or not list((home.run / "sandboxes").glob("[!.]*"))


TEMPLATE = pytest.mark.attack(
    "its template of sandboxes shows a sandbox a secret, or outlives the worker",
    stopped_by="the template is started like every other one, before any token is there, and ends with "
    "its worker",
)


@TEMPLATE
async def test_the_template_of_a_ready_worker_ends_with_it(ready: tuple[Home, Child]) -> None:
    """No process of a sandbox stays behind when somebody kills a ready worker."""
    _, child = ready
    templates = [identify(pid) for pid in _templates(child.pid)]
    assert templates
    child.kill_group()
    await eventually(lambda: not any(one is not None and is_alive(one) for one in templates), patience(10))


@TEMPLATE
async def test_a_template_sees_no_token_and_nothing_of_the_home(ready: tuple[Home, Child]) -> None:
    home, child = ready
    processes = _templates(child.pid)
    for pid in processes:
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert _reached(pid) == []
    own = os.readlink("/proc/self/ns/mnt")
    inside = [pid for pid in processes if os.readlink(f"/proc/{pid}/ns/mnt") != own]
    assert inside
    for pid in inside:
        assert Path(f"/proc/{pid}/root/usr").exists()
        assert not Path(f"/proc/{pid}/root{home.state}").exists()


@pytest.mark.attack(
    "another process hands it a job, or hands it a second one",
    stopped_by="it reads one line from a pipe that only the supervisor holds, and ends with its program",
)
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


@LOOKING_IN
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
