"""One command's way through asyncio client, socket, exec server and pseudo-terminal, and back."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import ptyprocess
from rollyard_sandbox.client import ExecClient

from rollyard_bench.processes import Missing
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import COMMAND_SECONDS, WrongOutput, bubblewrap, claimed
from rollyard_bench.stats import Contestant, Sample, interleave
from rollyard_bench.tmux import TmuxShell

ECHO = "echo hi"
SEQ = "seq 1 20000"
SEQ_BYTES = sum(len(str(number)) + 1 for number in range(1, 20_001))
MAX_OUTPUT = 1 << 20
SLEEP = 0.1  # seconds; the usual wait before a tmux pane is read
ROUNDS = 10
READ_SIZE = 1 << 16


class PtyTimeout(TimeoutError):
    """The marker did not come in time."""

    reason = "PtyTimeout"


class RawShell:
    """One interactive bash on a pseudo-terminal outside every sandbox, which is read by blocking.

    The end of a command is learnt in the customary way: the shell prints a marker after it. It is used as a
    context manager.
    """

    def __init__(self, timeout: float = 30.0) -> None:
        environment = {**os.environ, "PS1": "", "PS2": "", "PROMPT_COMMAND": "", "TERM": "dumb"}
        self._process = ptyprocess.PtyProcess.spawn(
            ["bash", "--norc", "--noprofile", "--noediting"],
            env=environment,
            echo=False,
            dimensions=(50, 200),
        )
        self._fd: int = self._process.fd
        self._timeout = timeout
        self._number = 0

    def __enter__(self) -> RawShell:
        self.blocking("PS1='' PS2=''")
        return self

    def __exit__(self, *_: object) -> None:
        # close() hangs up before it kills, and a shell that has already ended is fine.
        with suppress(ptyprocess.PtyProcessError, OSError):
            self._process.close(force=True)

    def _send(self, command: str) -> bytes:
        self._number += 1
        os.write(self._fd, f"{command}\nprintf '\\036{self._number}:%d\\036' $?\n".encode())
        return f"\036{self._number}:".encode()

    def blocking(self, command: str) -> bytes:
        """Run `command`, read the terminal as soon as it has data, and return the output without the marker.

        Raises:
            PtyTimeout: The shell did not answer in time.
        """
        marker = self._send(command)
        deadline = time.monotonic() + self._timeout
        output = bytearray()
        while True:
            seen = max(0, len(output) - len(marker) - 8)
            chunk = self._read(deadline)
            output += chunk
            at = output.find(marker, seen)
            if at >= 0 and output.find(b"\036", at + len(marker)) >= 0:
                return bytes(output[:at])

    def _read(self, deadline: float) -> bytes:
        if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise PtyTimeout(f"no marker within {self._timeout} s")
        return os.read(self._fd, READ_SIZE)


def ours(client: ExecClient, command: str, size: int) -> Callable[[], Awaitable[None]]:
    """Return a step that runs `command` and checks its exit status and all `size` bytes of its output."""

    async def step() -> None:
        result = await client.bash(command, timeout=COMMAND_SECONDS, max_output=MAX_OUTPUT)
        got = len(result.output.replace(b"\r\n", b"\n"))
        if result.exit_code != 0 or got != size:
            raise WrongOutput(f"{command!r}: exit code {result.exit_code}, {got} bytes instead of {size}")

    return step


def raw(shell: RawShell, command: str, size: int) -> Callable[[], None]:
    """Return the same step on the raw pty."""

    def step() -> None:
        got = len(shell.blocking(command).replace(b"\r\n", b"\n"))
        if got != size:
            raise WrongOutput(f"raw pty: {command!r}: {got} bytes instead of {size}")

    return step


def _tmux(shell: TmuxShell, *, pause: float, look_first: bool) -> Callable[[], None]:
    def step() -> None:
        shell.run(ECHO, pause=pause, look_first=look_first)

    return step


async def _echo(settings: Settings) -> tuple[dict[str, Sample], str]:
    """Time all ways to run `echo hi` in turns, and return why tmux is missing where it is."""
    scale = 1 if settings.quick else 3
    missing = ""
    with ExitStack() as stack:
        shell = stack.enter_context(RawShell())
        contestants = {"raw": Contestant(raw(shell, ECHO, 3), 300 * scale, warm_up=20)}
        try:
            at_once = stack.enter_context(TmuxShell())
            slept = stack.enter_context(TmuxShell())
        except Missing as error:
            missing = str(error)
        else:
            contestants["tmux_at_once"] = Contestant(_tmux(at_once, pause=0, look_first=True), 40 * scale)
            contestants["tmux_slept"] = Contestant(_tmux(slept, pause=SLEEP, look_first=False), 10 * scale)
        async with bubblewrap() as provider, claimed(provider) as sandbox:
            step = ours(sandbox.client, ECHO, 3)
            contestants["ours"] = Contestant(step, 300 * scale, warm_up=20)
            return await interleave(contestants, ROUNDS), missing


async def _seq(settings: Settings) -> dict[str, Sample]:
    samples = 40 if settings.quick else 120
    async with bubblewrap() as provider, claimed(provider) as sandbox:
        with RawShell() as shell:
            contestants = {
                "ours": Contestant(ours(sandbox.client, SEQ, SEQ_BYTES), samples),
                "raw": Contestant(raw(shell, SEQ, SEQ_BYTES), samples),
            }
            return await interleave(contestants, ROUNDS)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the figures of one command, each beside its baseline."""
    times, missing = await _echo(settings)
    own = times["ours"]

    def beside(figure: str, key: str, name: str, how: str) -> Measurement:
        if key not in times:
            return Measurement(figure, None, None, missing)
        text = f"ours {own.text()}; {name} {times[key].text()}; {how}"
        return Measurement(figure, own.p50, Baseline(name, times[key].p50), text)

    bare = beside("echo_p50", "raw", "raw pty, blocking read", "the raw pty is outside of any sandbox")
    how = "libtmux send_keys, then capture_pane in a tight loop until the marker shows"
    at_once = beside("echo_vs_tmux_at_once", "tmux_at_once", "tmux, read at once and again", how)
    how = "libtmux send_keys, sleep 0.1 s, capture_pane"
    slept = beside("echo_vs_tmux_after_sleep", "tmux_slept", "tmux, read after 0.1 s", how)
    long = await _seq(settings)
    how = f"all {SEQ_BYTES} bytes checked; ours in a sandbox {long['ours'].text()}; raw {long['raw'].text()}"
    baseline = Baseline("raw pty, blocking read", long["raw"].p50)
    return [bare, at_once, slept, Measurement("seq_20000", long["ours"].p50, baseline, how)]
