"""What the demos of the Makefile share: commands that are printed before they run, waits, and their end."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rollyard.errors import CliError
from rollyard.quickstart.run import conclude

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "examples" / "quickstart" / "tasks.jsonl"
ROLLYARD = Path(sys.executable).with_name("rollyard")
MODEL = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
POLL_SECONDS = 0.5
INTERRUPTED = 130


class DemoFailed(Exception):
    """A step did not do what it should; the text is its output."""


class Demo(ABC):
    """One run, in which every command is printed before it runs."""

    program: str
    """The name of the script, which stands before its errors."""
    before: tuple[str, ...] = ()
    """The words that make a command run as the user of the cluster."""
    env: Mapping[str, str] | None = None
    """The environment of the commands, if it is not that of this process."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self.options = options
        self.console = console

    def say(self, text: str) -> None:
        """Print a line that is not a command's output."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, command: str) -> None:
        """Print a command."""
        self.console.print(f"$ {command}", style="bold", markup=False, highlight=False, soft_wrap=True)

    def output(self, *command: str, quiet: bool = False, check: bool = True, live: bool = False) -> str:
        """Run a command and return what it prints.

        With `check` it must succeed; with `live` it prints to the terminal.
        """
        shown = shlex.join(os.path.relpath(word, ROOT) if word == str(ROLLYARD) else word for word in command)
        if not quiet:
            self.show(shown)
        done = subprocess.run(
            [*self.before, *command],
            env=self.env,
            cwd=ROOT,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=None if live else subprocess.PIPE,
            stderr=None if live else subprocess.PIPE,
        )
        if check and done.returncode != 0:
            raise DemoFailed(f"{shown}: {(done.stderr or done.stdout or '').strip()}")
        if not quiet and not live and done.stdout.strip():
            self.say(done.stdout.rstrip())
        return done.stdout or ""

    def first_tasks(self) -> str:
        """Return the lines of as many of the quickstart's tasks as were asked for."""
        count = self.options.tasks
        lines = [line for line in TASKS.read_text().splitlines(keepends=True) if line.strip()]
        if len(lines) < count:
            raise DemoFailed(f"--tasks {count}: {TASKS.name} holds {len(lines)}")
        return "".join(lines[:count])

    @contextmanager
    def removed_afterwards(self) -> Iterator[None]:
        """Remove the installation afterwards, whatever happens within the block, unless --keep is given."""
        keep = self.options.keep
        try:
            yield
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                self.explain()
            if not keep:
                try:
                    self.remove()
                except DemoFailed as further:
                    print(f"{self.program}: {further}", file=sys.stderr)
            raise
        if not keep:
            self.remove()

    def explain(self) -> None:
        """Print what helps to explain a failure."""
        for command in self.explanations():
            done = subprocess.run([*self.before, *command], env=self.env, capture_output=True, text=True)
            print(f"$ {shlex.join(command)}\n{done.stdout}{done.stderr}", file=sys.stderr)

    @abstractmethod
    def explanations(self) -> tuple[tuple[str, ...], ...]:
        """Return the commands whose output helps to explain a failure."""

    @abstractmethod
    def remove(self) -> None:
        """Remove what the demo has started. Nothing of it may be left."""


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a demo, which has ended."""

    trajectories: Path
    """The file of JSON lines, in the folder of this half."""
    seconds: float
    """The wall time of the job."""
    history: dict[str, Any] = field(default_factory=dict)
    """What happened to the backend, for the summary."""


def run_demo(program: str, demo: Callable[[], None]) -> int:
    """Run a demo and return its exit status. SIGTERM interrupts it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        demo()
    except (DemoFailed, CliError, subprocess.CalledProcessError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def wait_until(
    condition: Callable[[], bool], failure: str, seconds: float, poll_seconds: float = POLL_SECONDS
) -> None:
    """Wait until a condition holds.

    Raises:
        DemoFailed: It does not hold after so many seconds. The text begins with `failure`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{failure} after {seconds:.0f} s")
        time.sleep(poll_seconds)


def wait_until_gone(remaining: Callable[[], list[str]], seconds: float) -> None:
    """Wait until nothing remains.

    Raises:
        DemoFailed: Something remains after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while names := remaining():
        if time.monotonic() > deadline:
            raise DemoFailed(f"left behind: {'; '.join(names)}")
        time.sleep(POLL_SECONDS)


def conclude_halves(console: Console, embedded: Half, vllm: Half | str, title: str) -> None:
    """Print the summary of each half, and write them; that of the second half also into that of the first.

    Args:
        console: The console to print on.
        embedded: The half on the embedded engine.
        vllm: The half on vLLM, or why there is none.
        title: The line above the summary of the half on vLLM.
    """
    folder = embedded.trajectories.parent
    conclude(console, folder, embedded.trajectories, embedded.seconds)
    if isinstance(vllm, str):
        second: dict[str, Any] = {"skipped": vllm}
    else:
        console.print(f"\n[bold]{title}[/bold]")
        own_folder = vllm.trajectories.parent
        conclude(console, own_folder, vllm.trajectories, vllm.seconds)
        second = json.loads((own_folder / "summary.json").read_text()) | vllm.history
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vllm": second}, indent=2) + "\n")
