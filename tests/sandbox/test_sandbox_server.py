"""The server: programs, files, kill_all, lease, signals, protocol and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_sandbox import errors, proof
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError, SandboxError
from rollyard_sandbox.frames import FrameReader, encode
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually


async def test_run_is_a_fresh_process(any_client: ExecClient) -> None:
    await any_client.bash("export LEAK=1; cd /usr")
    result = await any_client.run(
        ["sh", "-c", "cat; echo err >&2; echo $LEAK$GIVEN; pwd; test -t 0 || exit 4"],
        stdin=b"in\n", env={"GIVEN": "g"}, cwd="/etc",
    )  # fmt: skip
    assert (result.exit_code, result.output, result.cwd) == (4, b"in\nerr\ng\n/etc\n", "/etc")


async def test_run_limits(client: ExecClient) -> None:
    result = await client.run(["sh", "-c", "echo partial; sleep 100"], timeout=0.3)
    assert (result.exit_code, result.output, result.timed_out, result.killed) == (
        137,
        b"partial\n",
        True,
        True,
    )
    result = await client.run(["seq", "1", "100000"], max_output=100)
    assert result.truncated_bytes == 588_895 - 100
    big = b"x" * 3_000_000
    assert (await client.run(["wc", "-c"], stdin=big)).text().strip() == "3000000"
    assert (await client.run(["true"], stdin=big)).exit_code == 0
    with pytest.raises(errors.LaunchError, match="no-such-program"):
        await client.run(["no-such-program"])
    with pytest.raises(errors.BadRequest, match="argv"):
        await client.run([])


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [("kill -TERM $$", 143), ("kill -KILL $$", 137), ("exit 130", 130), ("exit 255", 255), ("true", 0)],
)
async def test_a_program_that_ends_by_itself_was_not_ended(
    client: ExecClient, program: str, exit_code: int
) -> None:
    result = await client.run(["sh", "-c", f"echo said; {program}"])
    assert (result.exit_code, result.output) == (exit_code, b"said\n")
    assert not any((result.timed_out, result.killed, result.shell_restarted, result.truncated_bytes))
    result = await client.bash(f"sh -c {program!r}")
    assert (result.exit_code, result.timed_out, result.killed) == (exit_code, False, False)


async def test_no_request_gets_more_output_than_the_server_allows(start_server: Callable[..., Any]) -> None:
    server = start_server("--max-output", "100")
    async with await server.connect() as client:
        for asked, omitted in ((1000, 200), (100, 200), (50, 250)):
            printing = "printf '%300s' x"
            for result in (
                await client.run(["sh", "-c", printing], max_output=asked),
                await client.bash(printing, max_output=asked),
            ):
                assert (result.truncated_bytes, result.exit_code) == (omitted, 0)


async def test_the_environment_of_a_program_is_what_the_request_says(client: ExecClient) -> None:
    await client.set_env({"A": "server", "B": "server"})
    show = ["/bin/sh", "-c", "echo $A $B $C"]
    assert (await client.run(show, env={"B": "own", "C": "own"})).text() == "server own own\n"
    assert (await client.run(show, env={"B": "own"}, clean_env=True)).text() == "own\n"
    assert (await client.bash("echo $A $B $C", session="new")).text() == "server server\n"
    await client.set_env({"A": ""})
    assert (await client.run(show)).text() == "server\n"


async def test_the_limit_of_a_run_ends_all_that_it_started(client: ExecClient) -> None:
    result = await client.run(
        ["sh", "-c", "setsid sh -c 'echo $$; exec sleep 300' & sleep 300"], timeout=patience(1)
    )
    assert (result.exit_code, result.timed_out) == (137, True)
    assert await ended(int(result.text()))


async def test_run_leaves_nothing_behind(client: ExecClient) -> None:
    result = await client.run(["sh", "-c", "sleep 300 & echo $!; setsid sleep 300 & echo done"])
    pid = int(result.text().split()[0])
    assert result.text().endswith("done\n")
    assert await ended(pid)


_TERMINAL = """
import os, sys, time
ends = [os.ttyname(number) for number in range(3)]
assert len(set(ends)) == 1 and os.tcgetpgrp(0) == os.getpgrp() == os.getsid(0) == os.getpid(), ends
with open("/dev/tty", "w") as terminal:  # The terminal is the one of its session.
    terminal.write("by name\\n")
size = os.get_terminal_size()
print(size.lines, size.columns, os.environ["TERM"], os.environ["PAGER"], os.environ["GIVEN"], os.getcwd())
print("err", file=sys.stderr)
print("read", sys.stdin.readline().encode(), sys.stdin.read())
sys.exit(3)
"""


async def test_run_on_a_terminal(any_client: ExecClient) -> None:
    result = await any_client.run(
        [sys.executable, "-c", _TERMINAL], stdin=b"typed\n\x04", env={"GIVEN": "g"}, cwd="/etc", terminal=True
    )
    # Nothing is echoed, and line ends are as the program wrote them.
    assert result.text() == "by name\n50 200 dumb cat g /etc\nerr\nread b'typed\\n' \n"
    assert (result.exit_code, result.timed_out, result.killed, result.cwd) == (3, False, False, "/etc")
    result = await any_client.run(["/bin/sh", "-c", "echo $TERM."], terminal=True, env={"TERM": "xterm"})
    assert result.text() == "xterm.\n"
    result = await any_client.run(["/bin/sh", "-c", "echo $PAGER."], terminal=True, clean_env=True)
    assert result.text() == ".\n"


async def test_the_end_of_a_run_on_a_terminal(client: ExecClient) -> None:
    waits = ["sh", "-c", "echo partial; cat"]
    result = await client.run(waits, terminal=True, timeout=patience(0.3))
    assert (result.exit_code, result.timed_out, result.output) == (137, True, b"partial\n")
    result = await client.run(["seq", "1", "100000"], max_output=100, terminal=True)
    assert result.truncated_bytes == 588_895 - 100
    assert result.output.startswith(b"1\n2\n")
    assert result.output.endswith(b"99999\n100000\n")
    leaves = "trap '' HUP; sleep 300 & echo $!; setsid sleep 300 & exec 0<&- 1>&- 2>&-; echo late > /dev/tty"
    result = await client.run(["bash", "-c", leaves], terminal=True)
    pid, last = result.text().split()
    assert last == "late", "a terminal that was closed can be opened again"
    assert await ended(int(pid))
    with pytest.raises(errors.LaunchError, match="no-such-program"):
        await client.run(["no-such-program"], terminal=True)


async def test_runs_on_terminals_give_their_descriptors_back(server: Any, client: ExecClient) -> None:
    def held() -> int:
        return len(os.listdir(f"/proc/{server.process.pid}/fd"))

    await client.run(["true"], terminal=True)
    before = held()
    for program in ("true", "no-such-program"):
        runs = [client.run([program], terminal=True, stdin=b"x" * 10_000) for _ in range(8)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(result, errors.LaunchError) == (program != "true") for result in results)
    assert held() == before


async def test_files(any_client: ExecClient) -> None:
    data = os.urandom(2_000_000)
    await any_client.write_file("a/b/c.bin", data, mode=0o750)
    content = await any_client.read_file("a/b/c.bin", max_bytes=1 << 22)
    assert (content.data, content.size, content.mode, content.complete) == (data, len(data), 0o750, True)
    part = await any_client.read_file("a/b/c.bin", offset=1_999_990, max_bytes=5)
    assert (part.data, part.offset, part.complete) == (data[-10:-5], 1_999_990, False)
    await any_client.write_file("a/b/c.bin", b"new")
    assert (await any_client.read_file("a/b/c.bin")).text() == "new"
    entries = await any_client.list_dir("a/b")
    assert [(entry.name, entry.kind, entry.size, entry.mode) for entry in entries] == [
        ("c.bin", "file", 3, 0o644)
    ]
    beyond = await any_client.read_file("a/b/c.bin", offset=5)
    assert (beyond.data, beyond.offset) == (b"", 5)
    rest = await any_client.read_file("a/b/c.bin", offset=1)
    assert (rest.data, rest.size, rest.complete) == (b"ew", 3, False)
    await any_client.remove("a")
    assert await any_client.list_dir(".") == []


async def test_the_server_reads_nothing_of_its_own(client: ExecClient) -> None:
    """In /proc it would show its own memory, descriptors and environment to whoever asks for a file."""
    links = {"maps": "self/maps", "folder": "self/map_files", "machine": "cpuinfo"}
    await client.bash("; ".join(f"ln -s /proc/{target} {name}" for name, target in links.items()))
    for path in (*links, "/proc/self/maps", "/proc/thread-self/environ", "/proc/self/fdinfo/1"):
        with pytest.raises(FileError, match="in /proc") as caught:
            await client.read_file(path)
        assert caught.value.reason == "NotAFile"
    for path in ("folder", "/proc", "/proc/self/fd"):
        with pytest.raises(FileError, match="in /proc"):
            await client.list_dir(path)


async def test_entries_are_sorted_and_say_what_they_are(client: ExecClient) -> None:
    await client.bash("umask 022; mkdir z; echo abc > z/in; echo 12 > b; chmod 600 b; mkfifo p; ln -s z a")
    found = [(entry.name, entry.kind) for entry in await client.list_dir(".")]
    assert found == [("a", "symlink"), ("b", "file"), ("p", "other"), ("z", "directory")]
    (_, file, _, folder) = await client.list_dir(".")
    assert (file.size, file.mode, folder.mode) == (3, 0o600, 0o755)
    # A link is removed, and not what it leads to.
    await client.remove("a")
    assert [entry.name for entry in await client.list_dir("z")] == ["in"]
    await client.bash("ln -s nowhere broken")
    await client.remove("broken")
    assert [entry.name for entry in await client.list_dir(".")] == ["b", "p", "z"]


async def test_a_pipe_is_read_as_far_as_possible_without_waiting(client: ExecClient) -> None:
    await client.bash("mkfifo p; exec 9<>p; printf abc >&9")
    with pytest.raises(errors.FileError) as caught:
        await client.read_file("p", max_bytes=9)
    assert caught.value.reason == "WouldBlock"
    await client.bash("printf def >&9")
    assert (await client.read_file("p", max_bytes=3)).data == b"def"


async def test_writing_follows_symlinks_and_leaves_no_part(client: ExecClient) -> None:
    await client.bash("mkdir real; echo old > real/file; ln -s real/file link")
    await client.write_file("link", b"new")
    assert (await client.bash("cat real/file; readlink link; ls -A real")).text() == "newreal/file\nfile\n"


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (lambda c: c.read_file("none"), "FileNotFound"),
        (lambda c: c.read_file("/tmp"), "IsADirectory"),
        (lambda c: c.read_file("/etc/passwd/x"), "NotADirectory"),
        (lambda c: c.write_file("/etc/passwd/x", b""), "NotADirectory"),
        (lambda c: c.write_file("/tmp", b""), "IsADirectory"),
        (lambda c: c.write_file("n" * 300, b""), "NameTooLong"),
        (lambda c: c.list_dir("none"), "FileNotFound"),
        (lambda c: c.list_dir("/etc/passwd"), "NotADirectory"),
        (lambda c: c.remove("none"), "FileNotFound"),
    ],
)
async def test_file_errors(client: ExecClient, operation: Callable[[ExecClient], Any], reason: str) -> None:
    with pytest.raises(errors.FileError) as caught:
        await operation(client)
    assert caught.value.reason == reason


async def test_a_full_disk(client: ExecClient) -> None:
    await client.write_file("f", b"old")
    # A file-size limit of the server fails its writes in the middle, as a full disk does.
    resource.prlimit((await client.info()).pid, resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(errors.FileError) as caught:
        await client.write_file("f", b"x" * 10_000)
    assert caught.value.reason == "FileTooLarge"
    assert (await client.read_file("f")).data == b"old"
    assert [entry.name for entry in await client.list_dir(".")] == ["f"]


def test_a_full_disk_is_disk_full() -> None:
    error = errors.file_error(OSError(28, "No space left on device"), "/x")
    assert (error.reason, str(error)) == ("DiskFull", "/x: No space left on device")


async def test_kill_all_finds_every_escapee(client: ExecClient, server: Any) -> None:
    escapee = (
        "import os,time\n"
        "if os.fork() == 0:\n"
        " os.setsid()\n"
        " if os.fork() == 0:\n"
        "  open('pid','w').write(str(os.getpid())); time.sleep(300)\n"
        " os._exit(0)\n"
    )
    await client.write_file("escape.py", escapee.encode())
    outside = subprocess.Popen(["sleep", "300"])  # noqa: ASYNC220
    try:
        await client.bash("python3 escape.py; until [ -s pid ]; do sleep 0.01; done")
        await client.bash("sleep 300 & nohup sleep 300 >/dev/null 2>&1 & disown -a; V=1", session="b")
        both = [
            await client.start("sleep 300 & echo on; wait", session=name, timeout=patience(100))
            for name in ("c", "d")
        ]
        for running in both:
            await running.wait_for_output(b"on")
        wait = ["sh", "-c", "echo on > $0; exec sleep 300"]
        programs = [
            asyncio.create_task(client.run([*wait, name], timeout=patience(100))) for name in ("e", "f")
        ]
        await client.bash("until [ -s e ] && [ -s f ]; do sleep 0.01; done")
        pid = int((await client.read_file("pid")).text())
        assert await client.kill_all() >= 11
        assert await ended(pid)
        assert (await client.info()).sessions == ()
        for result in (*[await running.result() for running in both], *await asyncio.gather(*programs)):
            assert (result.killed, result.timed_out, result.exit_code) == (True, False, 137)
        assert children(server.process.pid) == []
        assert outside.poll() is None
        fresh = await client.bash("echo v=$V; pwd", session="b")
        assert (fresh.text(), fresh.shell_restarted) == (f"v=\n{server.work}\n", False)
    finally:
        outside.kill()
        outside.wait()


async def test_kill_all_beats_a_process_that_keeps_forking(client: ExecClient, server: Any) -> None:
    await client.write_file("fork.sh", b"sleep 0.2 & exec setsid sh fork.sh\n")
    await client.bash("setsid sh fork.sh >/dev/null 2>&1 &")
    for _ in range(3):
        await client.bash("sleep 0.02")
    await client.kill_all()
    assert children(server.process.pid) == []


async def test_orphans_are_reaped(client: ExecClient, server: Any) -> None:
    await client.bash("for i in 1 2 3 4 5; do (setsid true &); done; sleep 0.1")
    await eventually(
        lambda: children(server.process.pid, zombies=True) == children(server.process.pid), patience(10)
    )


async def test_a_client_renews_the_lease_as_it_connects(start_server: Callable[..., Any]) -> None:
    server = start_server("--lease", "30")
    async with await ExecClient.connect(server.addresses[0], lease=600) as client:
        left = (await client.info()).lease_seconds_left
        assert 590 < left <= 600
    async with await server.connect() as client:
        left = (await client.info()).lease_seconds_left
        assert left > 590, "a client without a lease leaves it as it is"


async def test_the_lease_ends_the_server_and_its_processes(start_server: Callable[..., Any]) -> None:
    server = start_server("--lease", "1")
    async with await server.connect() as client:
        pid = int((await client.bash("sleep 300 >/dev/null & echo $!")).text().split()[-1])
        await client.renew(60)
        left = (await client.info()).lease_seconds_left
        assert 50 < left <= 60
        # A program that ends at its own time limit, which is after the end of the first lease.
        assert (await client.run(["sleep", "300"], timeout=1.1)).timed_out
        waiting = asyncio.create_task(client.run(["sleep", "300"]))
        await client.renew(0.2)
        with pytest.raises(errors.ConnectionLost, match="lease has ended, because it was not renewed"):
            await waiting
        assert await server.exit_status() == 75
        with pytest.raises(errors.ConnectionLost):
            await client.bash("true")
    assert await ended(pid)
    assert not Path(server.addresses[0].removeprefix("unix:")).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_it_cleanly(start_server: Callable[..., Any], number: int) -> None:
    server = start_server()
    client = await server.connect()
    pid = int((await client.bash("setsid sleep 300 >/dev/null & echo $!")).text().split()[-1])
    server.process.send_signal(number)
    assert await server.exit_status() == 0
    assert await ended(pid)
    with pytest.raises(errors.ConnectionLost):
        await client.bash("true")
    await client.close()


async def test_a_killed_server_fails_every_waiting_call(start_server: Callable[..., Any]) -> None:
    server = start_server()
    client = await server.connect()
    calls = [asyncio.create_task(client.bash("sleep 100", session=f"s{i}")) for i in range(3)]
    await client.bash("true")
    server.process.kill()
    for call in calls:
        with pytest.raises(errors.ConnectionLost) as caught:
            await call
        assert caught.value.reason == "SandboxLost"
    await client.close()


async def test_shutdown(start_server: Callable[..., Any]) -> None:
    server = start_server()
    client = await server.connect()
    await client.shutdown()
    assert await server.exit_status() == 0


def hashed(text: str) -> tuple[str, str]:
    return "--token-sha256", hashlib.sha256(text.encode()).hexdigest()


async def test_a_token_is_proven_once_it_was_shown(start_server: Callable[..., Any]) -> None:
    """The server has its hash only; later clients show something else, and demand a proof."""
    server = start_server(*hashed("t"))
    address = server.addresses[0]
    with pytest.raises(SandboxError, check=lambda error: error.reason == "Unauthorized"):
        # It cannot know yet what is derived from the token.
        await ExecClient.connect(address, token="proven.t")
    async with await ExecClient.connect(address, token="t") as first:
        assert first.proven_token == "proven.t"
        await first.begin_eval()
    async with await ExecClient.connect(address, token="proven.t") as later:
        assert later.proven_token == "proven.t"
        await later.begin_eval()
    for wrong in ("proven.u", "proven.", "u", proof.derived("u")[0], proof.derived("t")[1].hex()):
        with pytest.raises(SandboxError, check=lambda error: error.reason == "Unauthorized"):
            await ExecClient.connect(address, token=wrong)


async def test_a_server_of_another_protocol_names_both_numbers(start_server: Callable[..., Any]) -> None:
    server = start_server()
    reader, writer = await asyncio.open_unix_connection(server.addresses[0].removeprefix("unix:"))
    writer.write(encode({"id": 1, "op": "hello", "version": 99}))
    head, _ = struct.unpack("!II", await reader.readexactly(8))
    answer = json.loads(await reader.readexactly(head))
    writer.close()
    assert answer["error"] == "ProtocolError"
    said = "exec server speaks protocol 1, and this client 99: use the sandbox image of the same version"
    assert said in answer["message"]


async def test_a_server_without_a_hash_proves_no_token(start_server: Callable[..., Any]) -> None:
    """Its token lies in a file that commands may read."""
    server = start_server(token=True)
    async with await server.connect() as client:
        assert client.proven_token is None
    async with await start_server().connect(token=None) as client:
        assert client.proven_token is None


@pytest.mark.parametrize("token", [None, "wrong", "ünicode"])
async def test_a_wrong_token_is_refused(start_server: Callable[..., Any], token: str | None) -> None:
    server = start_server(transports=("unix", "tcp"))
    for index in (0, 1):
        with pytest.raises(errors.SandboxError, check=lambda error: error.reason == "Unauthorized"):
            await server.connect(index, token)
        async with await server.connect(index) as client:
            assert (await client.bash("echo ok")).text() == "ok\n"


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(errors.ConnectionLost):
        await ExecClient.connect(f"unix:{tmp_path}/none")
    with pytest.raises(errors.BadRequest):
        await ExecClient.connect("http://localhost")


async def test_a_silent_server_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        with pytest.raises(errors.ConnectionLost):
            await ExecClient.connect(f"unix:{tmp_path}/s", timeout=0.2)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (struct.pack("!II", 1 << 30, 0), "ProtocolError"),
        (struct.pack("!II", 10, 1 << 31), "ProtocolError"),
        (struct.pack("!II", 3, 0) + b"{{{", "ProtocolError"),
        (struct.pack("!II", 2, 0) + b"[]", "ProtocolError"),
        (encode({"op": "bash", "id": 1, "session": "main"}, b"id"), "Unauthorized"),
        (encode({"op": "hello", "id": 1, "version": 99}), "ProtocolError"),
        (encode({"op": "hello"}), "ProtocolError"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "ProtocolError"),
    ],
)
async def test_broken_frames_are_answered(server: Any, sent: bytes, reason: str) -> None:
    reader, writer = await asyncio.open_unix_connection(server.addresses[0].removeprefix("unix:"))
    writer.write(sent)
    frames = list(FrameReader().feed(await reader.read(65536)))
    writer.close()
    assert frames[0][0]["error"] == reason
    async with await server.connect() as client:
        assert (await client.bash("echo ok")).text() == "ok\n"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"op": "nonsense"}, "op"),
        ({"op": "bash", "timeout": 1, "max_output": 1}, "session"),
        ({"op": "bash", "session": "s", "timeout": -1, "max_output": 1}, "timeout"),
        ({"op": "bash", "session": "s", "timeout": True, "max_output": 1}, "timeout"),
        ({"op": "bash", "session": "s", "timeout": 1, "max_output": "x"}, "max_output"),
        ({"op": "bash", "session": "", "timeout": 1, "max_output": 1}, "session"),
        ({"op": "run", "argv": "ls", "timeout": 1, "max_output": 1}, "argv"),
        ({"op": "run", "argv": ["ls"], "env": {"a": 1}, "timeout": 1, "max_output": 1}, "env"),
        ({"op": "read", "path": "a", "offset": -1, "max_bytes": 1}, "offset"),
        ({"op": "write", "path": "a", "mode": 1 << 20}, "mode"),
        ({"op": "renew", "seconds": 0}, "seconds"),
        ({"op": "renew", "seconds": 604_801}, "seconds"),
        ({"op": "renew", "seconds": "1"}, "seconds"),
        ({"op": "hello", "version": 1, "lease": 0}, "lease"),
        ({"op": "bash", "session": "s" * 201, "timeout": 1, "max_output": 1}, "session"),
        ({"op": "bash", "session": 1, "timeout": 1, "max_output": 1}, "session"),
        ({"op": "bash", "session": "s", "timeout": 1, "max_output": -1}, "max_output"),
        ({"op": "bash", "session": "s", "timeout": 1, "max_output": True}, "max_output"),
        ({"op": "run", "argv": ["ls", 1], "timeout": 1, "max_output": 1}, "argv"),
        ({"op": "run", "argv": ["ls"], "env": ["a"], "timeout": 1, "max_output": 1}, "env"),
        ({"op": "run", "argv": ["ls"], "cwd": 1, "timeout": 1, "max_output": 1}, "cwd"),
        ({"op": "read", "path": 1, "offset": 0, "max_bytes": 1}, "path"),
        ({"op": "read", "path": "a", "offset": 0, "max_bytes": -1}, "max_bytes"),
        ({"op": "write", "path": "a", "mode": 0o10000}, "mode"),
        ({"op": "write", "path": "a", "mode": False}, "mode"),
        ({"op": "end_init"}, "folders"),
        ({"op": "end_init", "folders": ["a"]}, "folders"),
        ({"op": "end_init", "folders": ["/a\0"]}, "folders"),
        ({"op": "set_env", "env": ["a"]}, "env"),
        ({"op": "set_env", "env": {"a": 1}}, "env"),
        ({"op": "set_env", "env": {"fine": "1", "": "1"}}, "env"),
        ({"op": "set_env", "env": {"a=b": "1", "fine": "1"}}, "env"),
        ({"op": "set_env", "env": {"a": "\0"}}, "env"),
        ({"op": "set_env", "env": {"\0": "a"}}, "env"),
        ({"op": "beneath", "action": "nonsense"}, "action"),
        ({"op": "beneath", "action": "make"}, "body"),
    ],
)
async def test_bad_requests_name_the_field(client: ExecClient, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"^{named}: "):
        await client._wire.request(fields)
    info = await client.info()
    assert (info.sessions, info.lease_seconds_left) == ((), None), "a refused request has no effect"


class Raw:
    """A connection that has greeted, on which a test sends whatever it likes and reads when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = FrameReader()
        self._read: list[tuple[dict[str, Any], bytes]] = []

    @classmethod
    async def connect(cls, server: Any) -> Raw:
        path = server.addresses[0].removeprefix("unix:")
        raw = cls(*await asyncio.open_unix_connection(path, limit=4096))
        raw.send(op="hello", id=0, version=1)
        await raw.answer(0)
        return raw

    def send(self, body: bytes = b"", **header: Any) -> None:
        self._writer.write(encode(header, body))

    async def answer(self, number: int) -> tuple[dict[str, Any], bytes, list[bytes]]:
        """Return the answer to a request, and the output that came before it."""
        output: list[bytes] = []
        async with asyncio.timeout(patience(30)):
            while True:
                while self._read:
                    header, body = self._read.pop(0)
                    if header["id"] == number and "event" not in header:
                        return header, body, output
                    output.append(body)
                self._read = list(self._frames.feed(await self._reader.read(1 << 16)))

    def close(self) -> None:
        self._writer.close()


WAITING = {"timeout": 600, "max_output": 100}


async def test_two_requests_in_flight_never_have_one_number(client: ExecClient, server: Any) -> None:
    raw = await Raw.connect(server)
    first = b"echo first > on; read -r; echo got $REPLY"
    raw.send(first, op="bash", id=7, session="a", reads_input=True, **WAITING)
    await client.bash("until [ -s on ]; do sleep 0.01; done")
    raw.send(b"echo second > on", op="bash", id=7, session="b", **WAITING)
    header, _, _ = await raw.answer(7)
    assert (header["error"], "in flight already" in header["message"]) == ("BadRequest", True)
    assert (await client.info()).sessions == ("a", "main"), "a refused request has no effect"
    raw.close()


async def test_output_that_a_client_does_not_read_is_left_out_on_the_way_and_in_the_result(
    client: ExecClient, server: Any
) -> None:
    raw = await Raw.connect(server)
    command = b"head -c 3000000 /dev/zero | tr '\\0' x; echo end > on"
    fields = {"timeout": 600, "max_output": 4_000_000, "stream": True}
    raw.send(command, op="bash", id=1, session="a", **fields)
    await client.bash("until [ -s on ]; do sleep 0.01; done")
    header, body, output = await raw.answer(1)
    assert (header["exit"], len(body), header["truncated"]) == (0, 3_000_000, 0)
    assert 0 < sum(map(len, output)) < 2_500_000, "the server keeps no more than a client may fall behind"
    raw.close()


async def test_output_on_the_way_ends_with_the_limit_of_the_result(client: ExecClient, server: Any) -> None:
    raw = await Raw.connect(server)
    raw.send(b"for i in 1 2 3 4; do printf %60s $i; sleep 0.02; done", op="bash", id=1, session="a",
             timeout=600, max_output=100, stream=True)  # fmt: skip
    header, _, output = await raw.answer(1)
    assert (sum(map(len, output)), header["truncated"]) == (100, 140)
    raw.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--listen", "tcp://127.0.0.1:0"], "--token-file"),
        (["--listen", "nonsense"], "nonsense"),
        (["--listen", "unix:/nonexistent/dir/sock"], "cannot listen"),
        (["--listen", "unix:/tmp/x", "--workdir", "/nonexistent"], "--workdir"),
        (["--listen", "unix:/tmp/x", "--lease", "-1"], "--lease"),
        (["--listen", "unix:/tmp/x", "--token-file", "/nonexistent"], "--token-file"),
        ([], "--listen"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], named: str) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "rollyard_sandbox.server", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_folder_runs_by_path_without_an_installed_package(tmp_path: Path) -> None:
    import ptyprocess
    import rollyard_sandbox

    for module in (rollyard_sandbox, ptyprocess):
        source = Path(module.__file__).parent
        shutil.copytree(
            source, tmp_path / "mounted" / source.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", str(tmp_path / "mounted" / "rollyard_sandbox")]
    command += ["--listen", f"unix:{tmp_path}/s", "--workdir", str(tmp_path), "--ready-fd", str(write)]
    process = subprocess.Popen(command, pass_fds=(write,))  # noqa: ASYNC220
    os.close(write)
    try:
        assert os.read(read, 1000)
        async with await ExecClient.connect(f"unix:{tmp_path}/s") as client:
            assert (await client.bash("echo hi")).text() == "hi\n"
            if not (await client.info()).ipython:
                with pytest.raises(errors.IPythonUnavailable, match="ipykernel"):
                    await client.ipython("1")
    finally:
        os.close(read)
        process.terminate()
        process.wait(patience(10))


def test_starting_imports_nothing_heavy() -> None:
    code = "import sys, rollyard_sandbox.server.command_line; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    modules = set(loaded.stdout.split())
    heavy = {
        "asyncio",
        "subprocess",
        "typing",
        "dataclasses",
        "jupyter_client",
        "zmq",
        "ptyprocess",
        "inspect",
    }
    assert not modules & heavy


async def ended(pid: int) -> bool:
    """Return whether `pid` ends within two seconds, or more on a slow machine."""
    late = time.monotonic() + patience(2)
    while time.monotonic() < late:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except OSError:
            return True
        await asyncio.sleep(0.01)
    return False


def children(pid: int, *, zombies: bool = False) -> list[int]:
    """Return the direct children of `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and (zombies or fields[0] not in "ZX"):
            found.append(int(path.parent.name))
    return found
