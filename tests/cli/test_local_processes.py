"""Children of the local driver end within bounds, die with their parent, and are swept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rollyard_drivers.host.child import Child, Folders, sweep
from rollyard_drivers.host.errors import HostError
from rollyard_drivers.host.home import Home, write_json
from rollyard_drivers.host.log_file import LogFile, last_line
from rollyard_drivers.host.processes import ProcessIdentity, end, identify, is_alive
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"
)
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    for name in ("logs", "pids"):
        (tmp_path / name).mkdir()
    return Folders(tmp_path / "logs", tmp_path / "pids")


async def is_up(child: Child, seconds: float = 20.0) -> None:
    await eventually(lambda: "up" in child.last_line, patience(seconds))


async def test_exit_status_last_line_and_wake(folders: Folders) -> None:
    ended = asyncio.Event()
    child = await Child.start("a", ["-c", "print('bye'); raise SystemExit(3)"], folders, on_exit=ended.set)
    async with asyncio.timeout(patience(20)):
        await ended.wait()
    assert (child.exit_code, child.last_line) == (3, "bye")
    assert not list(folders.pids.iterdir())
    assert (folders.logs / "a.log").read_text() == "bye\n"


async def test_stop_kills_what_ignores_sigterm(folders: Folders) -> None:
    child = await Child.start("a", ["-c", STUBBORN], folders)
    await is_up(child)
    assert [file.stem for file in folders.pids.iterdir()] == ["a"]
    await child.stop(0.2)
    assert child.exit_code == -signal.SIGKILL


async def test_second_sigterm_insists(folders: Folders) -> None:
    code = (
        "import signal, sys, time\n"
        "seen = []\n"
        "def stop(*_):\n"
        "    seen.append(1)\n"
        "    if len(seen) == 2: sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    child = await Child.start("a", ["-c", code], folders)
    await is_up(child)
    await child.stop(20.0, insist_after=0.2)
    assert child.exit_code == 7


def parent_script(folders: Folders) -> str:
    return (
        "import asyncio, os, signal\n"
        "from pathlib import Path\n"
        "from rollyard_drivers.host.child import Child, Folders\n"
        "async def main():\n"
        f"    folders = Folders(Path({str(folders.logs)!r}), Path({str(folders.pids)!r}))\n"
        f"    child = await Child.start('a', ['-c', {STUBBORN!r}], folders)\n"
        "    while 'up' not in child.last_line: await asyncio.sleep(0.02)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )


def test_children_die_with_a_killed_parent(folders: Folders) -> None:
    with subprocess.Popen([sys.executable, "-c", parent_script(folders)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        identity = identify(pid)
        assert identity is not None
        parent.kill()
        deadline = time.monotonic() + patience(20)
        while is_alive(identity) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not is_alive(identity)


def test_sweep_kills_leftovers_and_spares_strangers(folders: Folders) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        ) as left,
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        ) as other,
    ):
        try:
            ours, theirs = identify(left.pid), identify(other.pid)
            assert ours is not None
            assert theirs is not None
            write_json(folders.pids / "left.json", ours.to_json())
            reused = ProcessIdentity(theirs.pid, theirs.start_ticks - 1, theirs.boot_id)
            write_json(folders.pids / "reused.json", reused.to_json())
            (folders.pids / "broken.json").write_text("{")
            assert sweep(folders.pids) == ["left"]
            assert left.wait(patience(20)) == -signal.SIGKILL
            assert other.poll() is None
            assert not list(folders.pids.iterdir())
        finally:
            left.kill()
            other.kill()


def test_end_of_a_process_that_is_no_child_of_ours() -> None:
    script = (
        "import subprocess\n"
        f"child = subprocess.Popen({SLEEPER!r}, stdout=subprocess.DEVNULL, start_new_session=True)\n"
        "print(child.pid)\n"
    )
    pid = int(subprocess.check_output([sys.executable, "-W", "ignore", "-c", script]))
    identity = identify(pid)
    assert identity is not None
    assert end(identity, 10.0)
    assert not is_alive(identity)
    assert end(identity, 0.0), "ending what is gone is no error"


def test_one_supervisor_for_each_home(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with home.locked():
        home.write_supervisor(os.getpid())
        with pytest.raises(HostError, match=f"process {os.getpid()}.*rollyard down"), home.locked():
            pass
        assert (home.root.stat().st_mode & 0o777) == 0o700
    with home.locked():
        pass


def test_run_folder_is_short_enough_for_sockets(tmp_path: Path) -> None:
    assert Home(Path("/a")).run == Path("/a/run")
    deep = Home(tmp_path / ("x" * 100))
    assert len(os.fsencode(deep.run)) <= 64
    assert deep.run != Home(tmp_path / ("x" * 101)).run


def test_logs_are_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", limit=1000)
    for number in range(200):
        log.write(f"line {number:04}\n".encode())
    log.close()
    assert log.last_line() == "line 0199"
    assert last_line(tmp_path / "a.log") == "line 0199"
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size <= 1000 for file in files)
