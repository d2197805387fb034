"""The commands that solve repository tasks: in a sandbox, beside the same commands through tmux."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.starters.base import SANDBOX_ENV

from rollyard_bench.echo import SLEEP
from rollyard_bench.processes import ROOT, needed, output
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import WrongOutput, bubblewrap, claimed
from rollyard_bench.tmux import TmuxShell

RECIPES = ROOT / "examples" / "swe" / "recipes.json"
SCRIPT = ROOT / "scripts" / "swe_tasks.py"
FETCH_SECONDS = 600
ACTION_SECONDS = 120.0
MAX_OUTPUT = 64 << 10  # bytes; what the tool `bash` asks for
AROUND = 15  # lines that are shown before and after the bug
ROUNDS = 3
COMPILE = "python3 -m compileall -q ."
"""What installing a repository and its packages does: the modules are compiled before an agent comes."""

Act = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Episode:
    """A repository with a bug, and the commands with which an agent finds and mends it."""

    name: str
    archive: bytes
    """A tar file of the folders `repo` and `site`."""
    actions: tuple[str, ...]
    test: str
    """The command, among the others, that runs the tests."""
    mended: tuple[str, int, str]
    """The file, the number of its line, and the line without the bug."""

    def check(self, text: str) -> None:
        """Check that the commands have mended the file that has this text.

        Raises:
            WrongOutput: They have not.
        """
        path, number, line = self.mended
        lines = text.splitlines()
        if len(lines) < number or lines[number - 1] != line:
            raise WrongOutput(f"{self.name}: line {number} of {path} is not mended")


@dataclass(slots=True)
class Times:
    """The seconds of commands, those that run tests apart."""

    tests: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def add(self, more: Times) -> None:
        """Add the commands of a further episode."""
        self.tests += more.tests
        self.others += more.others

    def text(self) -> str:
        """Return text such as `tests 0.51 s, others 0.0042 s`."""
        return f"tests {mean(self.tests):.3g} s, others {mean(self.others):.3g} s"


async def episodes() -> list[Episode]:
    """Return the episodes of all recipes. pip fetches their source distributions, once for a machine.

    Raises:
        Missing: pip cannot fetch them.
        ProgramFailed: The tasks cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        rows = Path(folder, "rows.jsonl")
        command = (sys.executable, str(SCRIPT), "write", str(rows), "--layout", "rebench")
        await output(*command, seconds=FETCH_SECONDS)
        tasks = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    recipes = json.loads(RECIPES.read_text(encoding="utf-8"))
    return [_episode(recipe, row) for recipe, row in zip(recipes, tasks, strict=True)]


def _episode(recipe: dict[str, Any], row: dict[str, Any]) -> Episode:
    bug = recipe["bug"]
    path, number = bug["path"], bug["line"]
    named = re.search(r"`(\w+)", recipe["problem"])
    word = named.group(1) if named else Path(path).stem
    shown = f"sed -n {max(1, number - AROUND)},{number + AROUND}p {path}"
    test = f"{row['install_config']['test_cmd']} {' '.join(recipe['tests'])}"
    change = f"{number}s/{_pattern(bug['new'].strip())}/{_replacement(bug['old'].strip())}/"
    actions = (
        "cd repo && ls -la",
        "find . -name '*.py' | sort | head -n 100",
        f"grep -rn --include='*.py' -w {word} . | head -n 30",
        f"wc -l {path} && head -n 60 {path}",
        shown,
        test,
        f"sed -i {shlex.quote(change)} {path}",
        shown,
        test,
    )
    archive = base64.b64decode(row["repository"]["archive"])
    return Episode(recipe["project"], archive, actions, test, (path, number, bug["old"]))


def _pattern(text: str) -> str:
    return re.sub(r"([\\/.*\[\]^$])", r"\\\1", text)


def _replacement(text: str) -> str:
    return re.sub(r"([\\/&])", r"\\\1", text)


async def _timed(episode: Episode, act: Act) -> Times:
    """Return how long the commands of an episode take, from each call to its exit status.

    Raises:
        WrongOutput: A command failed.
    """
    times = Times()
    for action in episode.actions:
        begin = time.perf_counter()
        status = await act(action)
        (times.tests if action == episode.test else times.others).append(time.perf_counter() - begin)
        if status != 0:
            raise WrongOutput(f"{episode.name}: {action!r} ended with {status}")
    return times


async def _ours(provider: SandboxProvider, episode: Episode) -> Times:
    """Return the times of an episode in a sandbox of its own, through the exec server's persistent bash."""
    async with claimed(provider) as sandbox:
        client = sandbox.client

        async def act(command: str) -> int:
            result = await client.bash(command, timeout=ACTION_SECONDS, max_output=MAX_OUTPUT)
            return -1 if result.exit_code is None else result.exit_code

        await client.write_file("packed", episode.archive)
        if await act(f"tar -x --no-same-owner -f packed && rm packed && {COMPILE}") != 0:
            raise WrongOutput(f"{episode.name}: its archive cannot be unpacked in the sandbox")
        times = await _timed(episode, act)
        path = f"{sandbox.workdir}/repo/{episode.mended[0]}"
        episode.check((await client.read_file(path, max_bytes=1 << 20)).text())
        return times


def _compile(folder: Path, path: str) -> None:
    command = ["bash", "-c", COMPILE]
    subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, check=True, timeout=ACTION_SECONDS)


async def _through_tmux(episode: Episode) -> Times:
    """Return the times of an episode in a folder of its own, outside of a sandbox, through tmux."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(episode.archive)) as archive:
            archive.extractall(folder, filter="data")
        path = SANDBOX_ENV["PATH"]
        await asyncio.to_thread(_compile, folder, path)
        with TmuxShell(timeout=ACTION_SECONDS, cwd=folder) as bash:

            async def act(command: str) -> int:
                return bash.run(command, pause=SLEEP, look_first=False)

            await act(f"export PATH={shlex.quote(path)}")
            times = await _timed(episode, act)
        episode.check((folder / "repo" / episode.mended[0]).read_text(encoding="utf-8"))
        return times


async def measure(settings: Settings) -> list[Measurement]:
    """Play every episode on both sides, in turns."""
    needed("tmux", "tmux")
    played: Sequence[Episode] = await episodes()
    if settings.quick:
        played = played[::3]
    rounds = 1 if settings.quick else ROUNDS
    ours, tmux = Times(), Times()
    async with bubblewrap() as provider:
        for number in range(rounds):
            for position, episode in enumerate(played):
                if (number + position) % 2:
                    tmux.add(await _through_tmux(episode))
                    ours.add(await _ours(provider, episode))
                else:
                    ours.add(await _ours(provider, episode))
                    tmux.add(await _through_tmux(episode))
    how = (
        f"mean of {len(ours.tests + ours.others)} actions: {len(played)} repositories of examples/swe, "
        f"{rounds} times, in which an agent lists files, searches, reads, runs the tests, changes the wrong "
        f"line and runs the tests again; ours in a bubblewrap sandbox, by the tool's bash: {ours.text()}; "
        f"tmux outside of a sandbox, send_keys, then capture_pane every {SLEEP} s until the marker shows: "
        f"{tmux.text()}"
    )
    baseline = Baseline(f"tmux, read every {SLEEP} s", mean(tmux.tests + tmux.others))
    return [Measurement("swe_action_time", mean(ours.tests + ours.others), baseline, how)]
