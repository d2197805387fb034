"""Commands that sabotage their shell, forge its reports or refuse to end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError
from rollyard_testing.pace import patience


async def usable(client: ExecClient) -> None:
    """Check that the session runs commands as if nothing had happened."""
    result = await client.bash("echo ok", timeout=patience(5))
    assert (result.exit_code, result.output[-3:]) == (0, b"ok\n")


async def test_programs_do_not_inherit_the_channel(client: ExecClient) -> None:
    shown = await client.bash("ls -l /proc/self/fd")
    assert "socket:" not in shown.text()
    assert "memfd:" not in shown.text()
    # The fourth descriptor is that of the folder which is being listed.
    listed = await client.bash("python3 -c 'import os; print(sorted(os.listdir(\"/proc/self/fd\")))'")
    assert listed.text().strip() == "['0', '1', '2', '3']"


FORGERIES = [
    # A subshell is a fork: it holds the channel and writes to everything it holds.
    "( for f in /proc/self/fd/*; do printf '0 %08d' {1..9} >&${f##*/}; done; exit 3 )",
    "( printf '0 %s' $__ry >&11; printf 'x0 %s /' $__ry >&11; exit 3 )",
    # Opening a socket through /proc fails.
    "bash -c 'for f in /proc/$PPID/fd/*; do printf \"0 00000002\" > $f; done; exit 3'",
    # This is the report's text as output.
    "for i in {1..20}; do printf '0 %08d' $i; echo; done; (exit 3)",
    "yes '0 00000002' | head -c 200000; (exit 3)",
]


@pytest.mark.parametrize("command", FORGERIES)
async def test_reports_cannot_be_forged(client: ExecClient, command: str) -> None:
    await client.bash("true")
    result = await client.bash(
        f"{{ {command}; }} 2>/dev/null; s=$?; sleep 0.05; echo end; (exit $s)", timeout=patience(10)
    )
    assert (result.exit_code, result.shell_restarted) == (3, False)
    assert result.output.endswith(b"end\n")
    for i in range(5):
        assert (await client.bash(f"echo {i}")).text() == f"{i}\n"


async def test_a_background_subshell_cannot_end_later_commands(client: ExecClient) -> None:
    await client.bash("( while :; do printf '0 %08d' {1..40} >&11; sleep 0.01; done ) >/dev/null 2>&1 &")
    for i in range(8):
        result = await client.bash(f"sleep 0.05; (exit {i})")
        assert result.exit_code == i
    await usable(client)


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [("exit 3", 3), ("set -e; false", 1), ("kill -9 $$", 137), ("exec true", 0), ("exec sh -c 'exit 4'", 4)],
)
async def test_a_lost_shell_is_replaced_in_its_directory(
    client: ExecClient, command: str, exit_code: int
) -> None:
    await client.bash("mkdir -p deep/er; cd deep/er; V=1")
    result = await client.bash(f"echo before; {command}", timeout=patience(10))
    assert (result.exit_code, result.shell_restarted, result.killed) == (exit_code, True, False)
    assert result.output.startswith(b"before\n")
    following = await client.bash("basename $PWD; echo v=$V")
    assert (following.text(), following.shell_restarted) == ("er\nv=\n", False)


async def test_a_directory_entered_by_the_last_command_is_kept(client: ExecClient) -> None:
    result = await client.bash("cd /usr/bin && exit 5")
    assert (result.exit_code, result.cwd) == (5, "/usr/bin")
    assert (await client.bash("pwd")).text() == "/usr/bin\n"


async def test_a_directory_that_is_gone_falls_back(client: ExecClient, server: object) -> None:
    await client.bash("mkdir gone; cd gone; rmdir ../gone; exit 0")
    await usable(client)


@pytest.mark.parametrize(
    "command", ["exec bash", "exec bash --norc -i", "exec sh", "bash -c true; exec bash -l"]
)
async def test_exec_of_a_new_shell(client: ExecClient, command: str) -> None:
    await client.bash("cd /usr; export KEPT=1; DROPPED=1")
    result = await client.bash(command, timeout=patience(10))
    assert (result.exit_code, result.shell_restarted, result.timed_out) == (0, True, False)
    following = await client.bash("pwd; echo $KEPT,$DROPPED")
    assert following.text() == "/usr\n1,\n"


SABOTAGE = [
    "exec >/dev/null",
    "exec </dev/null",
    "exec 0<&-",
    "exec 0<&- 1>&- 2>&-",
    "exec 2>&1 >/dev/null </etc/passwd",
    "unset PROMPT_COMMAND",
    "PROMPT_COMMAND=",
    "exec 11>&- 12>&-",
    "for i in {3..255}; do eval \"exec $i>&-\"; done",
    "trap 'true' DEBUG",
    "trap 'false' DEBUG; shopt -s extdebug",
    "trap 'exit 1' DEBUG",
    "trap '' INT TERM; trap 'echo bye' EXIT",
    "stty raw; stty -a >/dev/null",
    "stty olcuc opost echo ixon",
    "stty -icanon min 0 time 1; stty intr x eof y",
    "set -o posix; set -u; set -f; set -o pipefail; set -C; set -a",
    "set -v; set -x",
    "set -n",
    "IFS=0123456789; unset PATH HOME",
    "readonly __ry",
    "printf() { :; }; read() { :; }; eval() { :; }",
    "builtin() { :; }",
    "command() { :; }; alias builtin=true; shopt -s expand_aliases",
    "enable -n printf read eval builtin",
    "ulimit -n 3",
    "TMOUT=1",
    "suspend -f",
    "kill -STOP $$",
    "printf '\\023'; printf '\\033c\\033[?25l\\033[6n'",
]  # fmt: skip


async def test_sabotage_harms_only_its_own_session(client: ExecClient) -> None:
    """All run at once, each in its session, beside one that notices nothing."""
    await client.bash("V=kept", session="other")

    async def sabotage(index: int, command: str) -> str | None:
        session = f"s{index}"
        await client.bash(command, session=session, timeout=1.5)
        # A sabotaged shell may need one command more to be found out; that one ends by its time limit.
        await client.bash("true", session=session, timeout=0.5)
        await client.bash("exit 0", session=session, timeout=1.5)
        result = await client.bash("echo ok", session=session, timeout=patience(10))
        return None if (result.exit_code, result.output[-3:]) == (0, b"ok\n") else f"{command}: {result}"

    async with asyncio.timeout(patience(40)):
        problems = await asyncio.gather(*(sabotage(i, command) for i, command in enumerate(SABOTAGE)))
    assert [problem for problem in problems if problem] == []
    other = await client.bash("echo $V", session="other")
    assert (other.text(), other.shell_restarted) == ("kept\n", False)


async def test_xtrace_shows_commands_and_not_our_machinery(client: ExecClient) -> None:
    await client.bash("set -x")
    result = await client.bash("echo traced")
    assert b"+ echo traced\ntraced\n" in result.output
    assert b"printf" not in result.output


@pytest.mark.parametrize(
    ("command", "killed", "exit_code", "output"),
    [
        ("echo partial; sleep 100", False, 130, b"partial\n"),
        ("sh -c \"trap '' INT; echo $$; while :; do sleep 1; done\"", True, 137, b""),
    ],
)
async def test_a_timeout_interrupts_and_kills_what_ignores_it(
    client: ExecClient, command: str, killed: bool, exit_code: int, output: bytes
) -> None:
    await client.bash("V=kept")
    result = await client.bash(command, timeout=0.3)
    assert (result.timed_out, result.killed, result.shell_restarted) == (True, killed, False)
    assert result.exit_code == exit_code
    assert result.output.startswith(output)
    assert (await client.bash("echo $V")).text() == "kept\n"


@pytest.mark.parametrize(
    "command",
    [
        "trap '' INT; while :; do :; done",
        "trap '' INT; while :; do sleep 100; done",
        "trap '' INT; cat /dev/tty",
        "while :; do bash -ic 'trap \"\" INT; sleep 100'; done",
    ],
)
async def test_a_stuck_shell_is_replaced(client: ExecClient, command: str) -> None:
    await client.bash("cd /usr")
    result = await client.bash(command, timeout=0.3)
    assert (result.timed_out, result.killed) == (True, True)
    assert (await client.bash("pwd")).text() == "/usr\n"


@pytest.mark.parametrize(
    "command", ["while :; do :; done", "read x </dev/tty", "cat /dev/tty", "bash -i </dev/tty", "yes"]
)
async def test_ordinary_endless_commands(client: ExecClient, command: str) -> None:
    result = await client.bash(command, timeout=0.5)
    assert result.timed_out
    await usable(client)


async def test_stopped_output_does_not_hang_past_the_limit(client: ExecClient) -> None:
    code = "import termios; termios.tcflow(1, termios.TCOOFF); print('x' * 10)"
    result = await client.bash(f'python3 -c "{code}"', timeout=1)
    assert result.exit_code is not None
    await usable(client)


async def test_a_cancelled_call_interrupts_its_command(client: ExecClient) -> None:
    task = asyncio.create_task(client.bash("echo $$ > pid; exec sleep 300", timeout=patience(100)))
    pid = await until_written(client, "pid")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until_gone(pid)
    await usable(client)


async def test_a_lost_client_interrupts_its_commands(client: ExecClient, server: object) -> None:
    other = await server.connect()
    running = asyncio.create_task(
        other.bash("echo $BASHPID > pid; exec sleep 300", timeout=patience(100), session="o")
    )
    program = asyncio.create_task(
        other.run(["sh", "-c", "echo $$ > pid2; exec sleep 300"], timeout=patience(100))
    )
    pids = [await until_written(client, name) for name in ("pid", "pid2")]
    await other.close()
    for task in (running, program):
        with pytest.raises(Exception, match="closed"):
            await task
    for pid in pids:
        await until_gone(pid)
    await usable(client)


async def until_written(client: ExecClient, path: str) -> int:
    """Return the number in a file, once it exists."""
    text = (await client.run(["sh", "-c", f"until [ -s {path} ]; do sleep 0.01; done; cat {path}"])).text()
    return int(text)


async def until_gone(pid: int) -> None:
    """Wait for the end of a process; the test's own time limit bounds it."""
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return
        except OSError:
            return
        await asyncio.sleep(0.01)


DEEP = """
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
for _ in range(5000):
    os.mkdir("d", dir_fd=folder)
    below = os.open("d", os.O_RDONLY, dir_fd=folder)
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=below))
    os.close(folder)
    folder = below
"""


async def test_deep_folders_are_removed(client: ExecClient) -> None:
    """No path reaches their end, and Python could not enter each of them within the one before."""
    inside = client.work_folder()
    for remove in (lambda: client.remove("top"), lambda: inside.remove([b"top"])):
        await client.bash("mkdir top")
        made = await client.run(["python3", "-c", DEEP, "top"], timeout=patience(60))
        assert made.exit_code == 0, made.text()
        await remove()
        assert (await client.bash("ls -a")).text().split() == [".", ".."]
    await usable(client)


@pytest.mark.parametrize("mode", ["000", "555"])
async def test_folders_that_may_not_be_entered_or_changed_are_removed(client: ExecClient, mode: str) -> None:
    await client.bash(f"mkdir -p top/a/b/c; touch top/a/b/file; chmod {mode} top/a/b/c top/a/b top/a")
    await client.remove("top")
    assert (await client.bash("ls")).text() == ""


async def test_removal_follows_no_link(client: ExecClient) -> None:
    await client.bash(
        "mkdir -p kept/in top/sub; touch kept/file; ln -s ../../kept top/sub/link; ln -s kept top/l"
    )
    await client.remove("top")
    assert (await client.bash("find . | sort")).text().split() == [".", "./kept", "./kept/file", "./kept/in"]


async def test_a_path_of_a_thousand_folders_is_made(client: ExecClient) -> None:
    await client.write_file("a/" * 1000 + "x", b"deep")
    assert (await client.read_file("a/" * 1000 + "x")).data == b"deep"
    with pytest.raises(FileError) as refused:
        await client.write_file("a/" * 2500 + "x", b"too deep")
    assert refused.value.reason == "NameTooLong"
    await usable(client)


async def test_a_long_chain_of_links_is_refused(client: ExecClient) -> None:
    await client.bash("for i in {1..1500}; do ln -s $((i+1)) $i; done; ln -s target near; touch 1501")
    with pytest.raises(FileError) as refused:
        await client.write_file("1", b"x")
    assert refused.value.reason == "SymlinkLoop"
    await client.write_file("near", b"through a link")
    assert (await client.bash("cat target; readlink near")).text() == "through a linktarget\n"
    await usable(client)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", "\udc80/x"])
async def test_a_path_that_is_none_is_a_file_that_is_not_there(client: ExecClient, path: str) -> None:
    for call in (
        client.read_file(path),
        client.write_file(path, b""),
        client.list_dir(path),
        client.remove(path),
    ):
        if path == "\udc80/x":  # These are bytes that are not UTF-8, which are a name as any other.
            with contextlib.suppress(FileError):
                await call
            continue
        with pytest.raises(FileError):
            await call
    await usable(client)
