"""Bash sessions as their users see them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollyard_sandbox.client import ExecClient, ExecResult
from rollyard_sandbox.errors import BadRequest, CommandTooLarge
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    """Expect that a request is refused for this reason."""
    with pytest.raises(BadRequest) as caught:
        yield
    assert caught.value.reason == reason


async def test_exit_code_output_and_directory(any_client: ExecClient) -> None:
    result = await any_client.bash("cd /usr; echo out; echo err >&2; (exit 7)")
    assert (result.exit_code, result.output, result.cwd) == (7, b"out\nerr\n", "/usr")
    assert not any((result.timed_out, result.killed, result.shell_restarted, result.truncated_bytes))
    assert result.seconds > 0


async def test_state_persists_and_is_global(client: ExecClient) -> None:
    await client.bash(
        "cd /tmp; export A=1; b=2; f() { echo f$1; }; declare -A map=([k]=v); alias ll='echo ll'"
    )
    result = await client.bash('echo $A $b $(f 3) ${map[k]} $(sh -c "echo $A"); ll; pwd')
    assert result.text() == "1 2 f3 v 1\nll\n/tmp\n"


async def test_last_status_is_visible_to_the_next_command(client: ExecClient) -> None:
    await client.bash("(exit 42)")
    assert (await client.bash("echo $?")).text() == "42\n"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("cat <<}\na\n}\n", "a\n"),
        ("cat <<'EOF'\n$x `y` \\\nEOF", "$x `y` \\\n"),
        ("{ cat <<EOF\nin\nEOF\n}", "in\n"),
        ("echo a\necho b\n\necho c", "a\nb\nc\n"),
        ("for i in 1 2\ndo\n echo $i\ndone", "1\n2\n"),
        ("# only a comment", ""),
        ("", ""),
        ("echo a # b", "a\n"),
        ("-n x 2>/dev/null; echo after", "after\n"),
        ("echo 'it'\"'\"'s'; echo \"!x\"", "it's\n!x\n"),
        ("printf 'é\\n'; echo 日本", "é\n日本\n"),
        ("echo $'\\x01\x03\x04\x11\x13\x7f'|od -An -c", " 001 003 004 021 023 177  \\n\n"),
    ],
)
async def test_commands_of_every_shape(client: ExecClient, command: str, output: str) -> None:
    result = await client.bash(command, timeout=patience(5))
    assert (result.exit_code, result.text()) == (0, output)


@pytest.mark.parametrize(
    "command", ['echo "open', "echo 'open", "if true", "(", "}", "cat $(", "for i in 1 2", "echo $((", "fi"]
)
async def test_syntax_errors_are_results(client: ExecClient, command: str) -> None:
    result = await client.bash(command, timeout=patience(5))
    assert result.exit_code in (1, 2)
    assert result.output.startswith(b"bash: ")
    assert not result.timed_out
    assert (await client.bash("echo ok")).text() == "ok\n"


@pytest.mark.parametrize("size", [3_400, 3_600, 4_096, 70_000, 5_000_000])
async def test_long_commands(client: ExecClient, size: int) -> None:
    text = "x" * size
    result = await client.bash(f"v='{text}'\necho ${{#v}}; declare -g later=yes", timeout=patience(30))
    assert result.text() == f"{size}\n"
    assert (await client.bash("echo $later")).text() == "yes\n"


async def test_nothing_of_a_long_command_is_left_in_the_next_one(client: ExecClient) -> None:
    for size in (9_000, 5_000):
        assert (await client.bash(f"# {'x' * size}\necho {size}\n")).text() == f"{size}\n"


async def test_nul_and_oversized_commands_are_refused(client: ExecClient) -> None:
    with pytest.raises(BadRequest, match="NUL"):
        await client.bash("echo \0")
    with pytest.raises(CommandTooLarge):
        await client.bash("#" * (33 * 1024 * 1024))
    assert (await client.bash("echo ok")).text() == "ok\n"


async def test_binary_output_is_intact(client: ExecClient, server: object) -> None:
    data = os.urandom(20_000)
    await client.write_file("blob", data)
    assert (await client.bash("cat blob", max_output=1 << 20)).output == data


async def test_no_carriage_returns_and_a_wide_terminal(client: ExecClient) -> None:
    result = await client.bash("echo a; python3 -c \"print('b')\"; test -t 1 && stty size </dev/tty")
    assert result.output == b"a\nb\n50 512\n"


async def test_output_is_capped_in_the_middle(client: ExecClient) -> None:
    result = await client.bash("seq 1 100000", max_output=1000)
    full = b"".join(b"%d\n" % i for i in range(1, 100001))
    assert result.truncated_bytes == len(full) - 1000
    assert result.output == full[:500] + b"\n[... %d bytes omitted ...]\n" % (len(full) - 1000) + full[-500:]


async def test_output_that_fits_exactly_is_whole(client: ExecClient) -> None:
    result = await client.bash("printf 1234567890", max_output=10)
    assert (result.output, result.truncated_bytes) == (b"1234567890", 0)


async def test_a_hundred_megabytes(client: ExecClient, server: object) -> None:
    result = await client.bash("head -c 100000000 /dev/zero; echo; echo end", timeout=patience(50))
    assert result.exit_code == 0
    assert result.truncated_bytes == 100_000_005 - 65536
    assert result.output.endswith(b"\0\nend\n")
    pid = (await client.info()).pid
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 100_000_000


async def test_every_byte_before_the_end_is_there(client: ExecClient) -> None:
    expected = b"".join(b"%d\n" % i for i in range(1, 2001))
    for _ in range(50):
        assert (await client.bash("seq 1 2000")).output == expected
        assert (await client.bash("echo last")).output == b"last\n"


async def test_background_output_comes_with_the_next_command(client: ExecClient) -> None:
    first = await client.bash("mkfifo go done; { read < go; echo late; echo > done; } & echo now")
    assert first.output.endswith(b"now\n")
    assert b"late" not in first.output
    second = await client.bash("echo > go; read < done; wait; echo next")
    assert b"late\n" in second.output
    assert second.output.endswith(b"next\n")


async def test_background_jobs_outlive_their_command(client: ExecClient) -> None:
    await client.bash("sleep 300 & echo $! > pid")
    assert (await client.bash("kill -0 $(cat pid) && jobs -r")).exit_code == 0


async def test_prompts_are_answered(any_client: ExecClient) -> None:
    running = await any_client.start("read -p 'name? ' n; echo hello $n")
    assert await running.wait_for_output(b"name? ") == b"name? "
    await running.send_input(b"Ada\n")
    result = await running.result()
    assert result.output == b"name? hello Ada\n"
    running = await any_client.start("python3 -c \"print(input('again? ') * 2)\"")
    await running.wait_for_output(b"again? ")
    await any_client.send_input(b"ab\n")
    assert (await running.result()).output == b"again? abab\n"


@pytest.mark.parametrize(
    ("command", "output", "exit_code"),
    [
        ("grep -c maple", "0\n", 1),
        ("cat; read line; echo $?", "1\n", 0),
        ("bash; python3; echo ended", "ended\n", 0),
        ("cat & wait; echo ended", "ended\n", 0),
        ("find . -maxdepth 0 -exec cat \\;", "", 0),
        ("cat <<END\nhere\nEND", "here\n", 0),
        ("f() { read line; echo got $line; }; echo piped | f", "got piped\n", 0),
        ("cat < /proc/sys/kernel/ostype; cat <<< word", "Linux\nword\n", 0),
        ("[ -t 0 ] || [ -t 1 ] && echo terminal", "terminal\n", 0),
        ("true " + "x" * 5000 + "; cat", "", 0),
    ],
)
async def test_a_command_that_reads_standard_input_ends_at_once(
    client: ExecClient, command: str, output: str, exit_code: int
) -> None:
    """A hang would be a timeout, with no exit status of the program."""
    await client.bash("kept=1; set -m")
    result = await client.bash(command, timeout=patience(20))
    said = result.text() if "&" not in command else result.text()[-len(output) :]
    assert (said, result.exit_code, result.timed_out) == (output, exit_code, False)
    following = await client.bash("echo $kept")
    assert (following.text(), following.shell_restarted) == ("1\n", False)


@pytest.mark.parametrize(
    "command", ["exec 3</dev/zero 10>ten 2>&1; cat <&-", "echo ${none:?}", "for ((;;", "kill -INT $$; cat"]
)
async def test_the_shell_reads_on_after_a_command_that_failed(client: ExecClient, command: str) -> None:
    """Bash gives its own terminal back to standard input, however the command ends."""
    await client.bash("kept=1")
    await client.bash(command, timeout=patience(20))
    following = await client.bash("cat; echo $kept", timeout=patience(20))
    assert (following.text().strip(), following.shell_restarted) == ("1", False)


async def test_unread_input_is_never_run_as_a_command(client: ExecClient) -> None:
    running = await client.start("read -p '? ' x; echo got $x")
    await running.wait_for_output(b"? ")
    await running.send_input(b"1\ntouch pwned\nexit 9\n")
    assert (await running.result()).exit_code == 0
    assert (await client.bash("ls pwned")).exit_code == 2


async def test_interrupting_a_running_command(client: ExecClient) -> None:
    running = await client.start("echo go; sleep 100", timeout=patience(30))
    await running.wait_for_output(b"go\n")
    await running.interrupt()
    result = await running.result()
    assert (result.exit_code, result.timed_out, result.killed) == (130, False, False)
    assert running.output_so_far().startswith(b"go\n")


async def there(path: Path, ended: asyncio.Future[ExecResult]) -> None:
    """Wait for a file, or the end of the command that is to make it.

    (Output would not do: a kernel may show what a terminal got last only when more is written to it.)
    """
    await eventually(lambda: path.exists() or ended.done(), patience(20), pause=0.001)


async def test_an_interrupt_reaches_jobs_that_are_just_starting(client: ExecClient, tmp_path: Path) -> None:
    """A job is bash's own copy until it becomes its program, and that copy forgets a SIGINT."""
    for number, command in enumerate(
        ("sleep 100", "sleep 100 | sleep 100", "(sleep 100)", "env sleep 100") * 6
    ):
        mark = tmp_path / f"begun-{number}"
        running = await client.start(f"echo > {mark}; {command}", timeout=patience(20))
        ended = asyncio.ensure_future(running.result())
        await there(mark, ended)
        await running.interrupt()
        result = await ended
        assert (result.exit_code, result.timed_out, result.killed) == (130, False, False), command


@pytest.mark.parametrize("interrupts", ["dies of an interrupt", "ignores interrupts"])
async def test_a_job_that_outlives_its_interrupted_command(
    client: ExecClient, tmp_path: Path, interrupts: str
) -> None:
    """Bash that is interrupted as it forks a job reports the command's end, and then waits for the job.

    Here a trap makes it start one between its report and its next command.
    """
    job, mark = tmp_path / "job", tmp_path / "mark"
    ignored = "trap '' INT; " if interrupts == "ignores interrupts" else ""
    job.write_text(f"{ignored}echo $$ > {job}.pid; exec sleep 100")
    late = f'[[ $BASH_COMMAND == *"read -r -N"* ]] && {{ trap - DEBUG; bash {job}; }}'
    running = await client.start(f"trap '{late}' DEBUG; echo > {mark}; sleep 100", timeout=patience(20))
    ended = asyncio.ensure_future(running.result())
    await there(mark, ended)
    await running.interrupt()
    assert (await ended).exit_code == 130
    after = await client.bash("echo after", timeout=patience(20))
    assert (after.text().splitlines()[-1], after.exit_code, after.shell_restarted) == ("after", 0, False)
    written = Path(f"{job}.pid")
    pid = written.read_text().strip() if written.exists() else ""  # It may have ended before it wrote.
    assert not pid or not alive(int(pid))


@pytest.mark.parametrize("idle", [False, True])
async def test_a_shell_that_hangs_after_an_interrupt_is_replaced(
    client: ExecClient, tmp_path: Path, idle: bool
) -> None:
    mark, shell = tmp_path / "mark", tmp_path / "shell"
    stop = '[[ $BASH_COMMAND == *"read -r -N"* ]] && kill -STOP $$'
    running = await client.start(f"cd /tmp; trap '{stop}' DEBUG; echo $$ > {shell}; echo > {mark}; sleep 100")
    ended = asyncio.ensure_future(running.result())
    await there(mark, ended)
    await running.interrupt()
    assert (await ended).exit_code == 130
    await eventually(lambda: not idle or not alive(int(shell.read_text())), patience(30))
    after = await client.bash("pwd", timeout=patience(20))
    assert (after.text(), after.exit_code, after.shell_restarted) == ("/tmp\n", 0, True)


async def test_a_command_after_an_interrupt_is_not_lost(client: ExecClient) -> None:
    """Bash may act on a SIGINT only when it has read what it is to do next."""
    rng = random.Random(0)

    async def rounds(session: str) -> int:
        interrupts = 0
        await client.bash("true", session=session)
        for number in range(40):
            running = await client.start(
                "for i in 1 2 3 4 5; do /bin/true; done", timeout=patience(20), session=session
            )
            ended = asyncio.ensure_future(running.result())
            await asyncio.sleep(rng.uniform(0.0, 0.01))
            with contextlib.suppress(BadRequest):
                await running.interrupt()
                interrupts += 1
            await ended
            result = await client.bash(f"echo {number}", timeout=patience(20), session=session)
            assert (result.exit_code, result.timed_out) == (0, False)
            assert result.text().removeprefix("\n") == f"{number}\n", (
                "bash prints a line's end at an interrupt"
            )
        return interrupts

    assert sum(await asyncio.gather(*(rounds(f"s{i}") for i in range(8)))) > 0


async def test_an_interrupt_before_the_shell_is_ready(client: ExecClient) -> None:
    running = await client.start("echo begun", timeout=patience(20), session="new")
    await running.interrupt()
    result = await running.result()
    assert (result.text().strip(), result.exit_code) in (("", 130), ("begun", 0), ("begun", 130))
    assert (await client.bash("echo next", session="new")).text() == "next\n"


async def test_a_program_gets_one_interrupt(client: ExecClient, tmp_path: Path) -> None:
    """A second one would cut off what it does about the first."""
    begun, script = tmp_path / "begun", tmp_path / "script"
    script.write_text(
        f"n=0; trap 'n=$((n+1))' INT; echo > {begun}; "
        "for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done; echo got $n"
    )
    running = await client.start(f"bash {script}", timeout=patience(20))
    ended = asyncio.ensure_future(running.result())
    await there(begun, ended)
    await running.interrupt()
    result = await ended
    assert "got 1" in result.text()


async def test_input_needs_a_running_command(client: ExecClient) -> None:
    await client.bash("true")
    for session in ("main", "never-used"):
        with refused("NoCommandRunning"):
            await client.send_input(b"x\n", session=session)
        with refused("NoCommandRunning"):
            await client.interrupt(session=session)


async def test_sessions_are_apart_and_run_at_once(client: ExecClient) -> None:
    await asyncio.gather(*(client.bash(f"v={i}; mkfifo p{i}", session=f"s{i}") for i in range(8)))
    # Each waits for the next one's word, so this ends only if all of them run at once.
    commands = [
        client.bash(f"(echo $v > p{(i + 1) % 8}) & cat p{i}; wait", session=f"s{i}") for i in range(8)
    ]
    results = await asyncio.gather(*commands)
    for i, result in enumerate(results):
        assert f"{(i - 1) % 8}\n".encode() in result.output


async def test_one_command_at_a_time(client: ExecClient) -> None:
    running = await client.start("echo on; sleep 100")
    await running.wait_for_output(b"on")
    with refused("SessionBusy"):
        await client.bash("true")
    await running.interrupt()
    await running.result()


async def test_closing_a_session_ends_its_processes(client: ExecClient) -> None:
    pid = int((await client.bash("sleep 300 & echo $!; V=1", session="x")).text().split()[-1])
    await client.close_session("x")
    await client.close_session("x")
    assert (await client.bash("echo v=$V", session="x")).text() == "v=\n"
    # It has been killed, but a busy machine may take a moment to end it.
    await eventually(lambda: not alive(pid), patience(5))


async def test_the_number_of_sessions_is_bounded(start_server: Callable[..., object]) -> None:
    server = start_server("--max-sessions", "2")
    async with await server.connect() as client:
        await client.bash("true", session="a")
        await client.bash("true", session="b")
        with refused("TooManySessions"):
            await client.bash("true", session="c")
        await client.close_session("a")
        assert (await client.bash("echo ok", session="c")).text() == "ok\n"


def alive(pid: int) -> bool:
    """Return whether `pid` runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
