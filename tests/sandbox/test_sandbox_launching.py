"""Starting programs: with machine code in borrowed memory, and by a fork, which give the same."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollyard_sandbox.execution.launching import launch
from rollyard_sandbox.isolation import system_calls
from rollyard_sandbox.isolation.protections import Protections
from rollyard_sandbox.isolation.system_calls import Calls, Launcher
from rollyard_testing.pace import patience

LOOK = """
import json, os, signal
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "cwd": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(int(n) for n in os.listdir("/dev/fd") if os.path.exists(f"/dev/fd/{n}")),
    "blocked": status["SigBlk"].strip(),
    "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
    "terminal": os.isatty(0),
    "filtered": status["Seccomp"].strip(),
    "environment": dict(os.environ),
}))
"""


def children() -> set[str]:
    """Return the children of this process, those that have ended and were not reaped among them."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(params=["machine code", "fork"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fork":
        forks = Launcher(None)
        monkeypatch.setattr(system_calls, "starter", lambda: forks)
    elif system_calls._machine_code() is None:
        pytest.skip("machine code is for x86_64 with Linux 5.11")
    return str(request.param)


def run(
    argv: list[str],
    environment: dict[str, str],
    cwd: Path,
    inherited: tuple[int, ...] = (),
    *,
    filtered: bool = False,
) -> tuple[int, str]:
    """Start a program, and return its exit status and its output."""
    read, write = os.pipe()
    with open(os.devnull, "rb") as nothing, os.fdopen(read) as output:
        try:
            pid = launch(
                argv, environment, str(cwd), Protections(filter_calls=filtered),
                (nothing.fileno(), write, write), inherited=inherited,
            )  # fmt: skip
        finally:
            os.close(write)
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def test_a_program_starts_with_nothing_of_the_servers(way: str, tmp_path: Path) -> None:
    inheritable = os.dup(0)
    os.set_inheritable(inheritable, True)
    wanted = os.open(os.devnull, os.O_RDONLY)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        status, text = run(
            [sys.executable, "-I", "-S", "-c", LOOK], {"A": "ä b"}, tmp_path, (wanted,), filtered=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        os.close(inheritable)
        os.close(wanted)
    assert status == 0, text
    seen = json.loads(text)
    assert seen.pop("environment")["A"] == "ä b"
    assert seen == {
        "cwd": str(tmp_path), "session": True, "descriptors": [0, 1, 2, wanted], "blocked": "0" * 16,
        "pipe": True, "terminal": False, "filtered": "2",
    }  # fmt: skip


def test_the_mask_and_the_handlers_of_this_process_stay(way: str, tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handler = signal.getsignal(signal.SIGTERM)
    assert run(["true"], dict(os.environ), tmp_path) == (0, "")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_name_is_looked_up_in_the_path_of_the_environment(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "hello").write_text("#!/bin/sh\necho hello from $0\n")
    (folder / "hello").chmod(0o755)
    status, text = run(["hello"], {"PATH": f"/nowhere:{folder}/hello:{folder}"}, tmp_path)
    assert (status, text) == (0, f"hello from {folder}/hello\n")


@pytest.mark.parametrize(
    ("argv", "cwd", "number", "filename"),
    [
        (["no-such-program"], ".", errno.ENOENT, "no-such-program"),
        (["./absent"], ".", errno.ENOENT, "./absent"),
        (["./plain"], ".", errno.EACCES, "./plain"),
        (["plain"], ".", errno.EACCES, "plain"),
        (["true"], "absent", errno.ENOENT, "absent"),
        (["true"], "plain", errno.ENOTDIR, "plain"),
    ],
)
def test_what_keeps_a_program_from_starting_is_said(
    way: str, tmp_path: Path, argv: list[str], cwd: str, number: int, filename: str
) -> None:
    (tmp_path / "plain").write_text("no program")
    before = children()
    with pytest.raises(OSError, match=": ") as caught:
        run(argv, {"PATH": f"{tmp_path}:/usr/bin:/bin"}, tmp_path / cwd)
    assert caught.value.errno == number
    assert caught.value.filename in (filename, str(tmp_path / filename))
    assert children() <= before  # The child that executed nothing has been reaped.


@pytest.mark.parametrize(
    ("argv", "environment"),
    [(["echo", "a\0b"], {}), (["true"], {"A": "a\0b"}), (["true"], {"A=B": "x"}), (["true"], {"": "x"})],
)
def test_what_no_program_can_be_given_is_refused(
    way: str, tmp_path: Path, argv: list[str], environment: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"null byte|variable name"):
        run(argv, {"PATH": os.environ["PATH"], **environment}, tmp_path)


def test_a_protection_that_is_refused_keeps_the_program_from_running(way: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    calls = Calls()
    calls.purpose = "NotConfined"
    calls.add("setns", 1 << 20, 0)
    touch = calls.texts(["touch", str(marker)])
    calls.add("execve", calls.text("/usr/bin/touch"), touch, calls.texts([]), may_fail=True)
    with pytest.raises(OSError, match="setns: Bad file descriptor") as caught:
        calls.start()
    assert caught.value.filename == "NotConfined"
    assert not marker.exists()


def test_a_call_that_may_fail_ends_nothing(way: str, tmp_path: Path) -> None:
    calls = Calls()
    calls.add("setns", 1 << 20, 0, may_fail=True)
    calls.add("execve", calls.text("/bin/true"), calls.texts(["true"]), calls.texts([]), may_fail=True)
    assert os.waitpid(calls.start(), 0)[1] == 0


def test_hundreds_of_starts_leave_nothing(way: str, tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(3):
        run(["true"], {"PATH": os.environ["PATH"]}, tmp_path)
    before = held()
    for _ in range(200):
        with pytest.raises(OSError, match=": "):
            run(["./absent"], {}, tmp_path)
    # What other tests have left in this process may open or close something meanwhile. A start that leaves
    # anything would leave it 200 times.
    assert all(abs(now - then) < 20 for now, then in zip(held(), before, strict=True))


def test_a_start_that_a_signal_stops_is_ended_even_after_a_failed_look(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Launcher(None if way == "fork" else system_calls._machine_code())
    monkeypatch.setattr(system_calls, "starter", lambda: fresh)
    monkeypatch.setattr(system_calls, "STOPPED_SECONDS", 0.1)
    looks: list[int] = []
    look = system_calls._stopped_children

    def failing_first() -> list[int]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise FileNotFoundError("a thread has ended meanwhile")
        return look()

    monkeypatch.setattr(system_calls, "_stopped_children", failing_first)
    before = children()
    returned, late = threading.Event(), list[int]()

    def stop() -> None:
        while not (new := children() - before):
            time.sleep(0.01)
        child = int(new.pop())
        os.kill(child, signal.SIGSTOP)
        if not returned.wait(patience(10)):
            late.append(child)
            os.kill(child, signal.SIGKILL)  # Otherwise the start would never return.

    stopping = threading.Thread(target=stop)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = Calls()
        calls.add("recvfrom", theirs.fileno(), array("B", [0]), 1, 0, 0, 0)  # Nothing ever comes.
        calls.add("execve", calls.text("/bin/true"), calls.texts(["true"]), calls.texts([]), may_fail=True)
        stopping.start()
        child = calls.start()
        returned.set()
        stopping.join()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not late
    assert len(looks) > 1


def test_a_start_without_room_for_a_thread_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(system_calls, "_thread", SimpleNamespace(start_new_thread=refuse))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="can't start new thread"):
        Launcher(None).prepare()
    assert os.listdir("/proc/self/fd") == before
