"""The processor time of Rollyard's own processes for each rollout of the quickstart.

The processes below the quickstart are looked at many times a second, and the last time that each has shown is
what it has taken. What one takes in its very last moments is missed, and so are processes that live shorter.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rollyard_bench.processes import ProgramFailed, needed, program
from rollyard_bench.results import Baseline, Measurement, Settings

LOOK_SECONDS = 0.05
RUN_SECONDS = 600.0
RUNS = 3
OWN = ("control plane", "worker", "exec server")
ENGINE = "engine"
_TICK = 1.0 / os.sysconf("SC_CLK_TCK")
# The first words in the command line decide. A command of a sandbox shows none of them.
_KINDS = (
    ("rollyard_api", "control plane"),
    ("rollyard_pipeline", "worker"),
    ("bwrap", "bwrap"),
    ("rollyard_sandbox", "exec server"),
    ("rollyard_engine", ENGINE),
    ("rollyard", "command line and driver"),
)


class Tree:
    """The processes below one process, with the last processor time in seconds that each has shown."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._seconds: dict[tuple[int, int], float] = {}
        self._kinds: dict[tuple[int, int], str] = {}

    def look(self) -> None:
        """Look at every process once."""
        waiting = [self._root]
        while waiting:
            pid = waiting.pop()
            try:
                stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
                fields = stat[stat.rindex(")") + 2 :].split()
                words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
                exact = 0
                for task in Path(f"/proc/{pid}/task").iterdir():
                    exact += int((task / "schedstat").read_text().split()[0])
                    waiting += [int(child) for child in (task / "children").read_text().split()]
            except (FileNotFoundError, ProcessLookupError):
                continue
            key = (pid, int(fields[19]))
            # Ticks are coarse, and the exact times lack those of threads that have ended.
            self._seconds[key] = max((int(fields[11]) + int(fields[12])) * _TICK, exact / 1e9)
            if words.strip():
                self._kinds[key] = _kind(words)

    def totals(self) -> Counter[str]:
        """Return the seconds of each kind of process."""
        totals: Counter[str] = Counter()
        for key, seconds in self._seconds.items():
            totals[self._kinds.get(key, "commands")] += seconds
        return totals


def _kind(words: str) -> str:
    if words.startswith(("/bin/sh -c n=$1", "bwrap", "/usr/bin/bwrap")):
        return "bwrap"
    return next((kind for name, kind in _KINDS if name in words), "commands")


async def _quickstart(tasks: int, samples: int) -> Counter[str]:
    """Run the quickstart of this checkout, and return the processor time of its processes, in seconds.

    Raises:
        Missing: There is no bubblewrap.
        ProgramFailed: It failed, or has not ended every rollout.
    """
    needed("bwrap", "bubblewrap")
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "rollyard", "quickstart", "--out", str(folder / "out")]
        command += ["--tasks", str(tasks), "--samples", str(samples)]
        async with asyncio.timeout(RUN_SECONDS), program(command, folder / "quickstart.log") as running:
            tree = Tree(running.process.pid)
            ended = asyncio.ensure_future(running.process.wait())
            while not ended.done():
                tree.look()
                await asyncio.wait({ended}, timeout=LOOK_SECONDS)
            if running.process.returncode != 0:
                raise ProgramFailed(f"the quickstart failed: {running.tail()}")
        done = json.loads((folder / "out" / "summary.json").read_text())
    if done["rollouts"] != tasks * samples:
        raise ProgramFailed(f"the quickstart has {done['rollouts']} of {tasks * samples} rollouts")
    return tree.totals()


async def measure(settings: Settings) -> list[Measurement]:
    """Run the quickstart several times, and return the run with the median.

    The engine of that very run is the baseline: a slow machine makes both slower alike.
    """
    tasks, samples = (32, 8) if settings.quick else (64, 8)
    runs = [await _run(tasks, samples) for _ in range(1 if settings.quick else RUNS)]
    totals = [sum(each[kind] for kind in OWN) for _, each in runs]
    middle = statistics.median_low(totals)
    seconds, each = runs[totals.index(middle)]
    text = ", ".join(f"{kind} {each[kind]:.1f} ms" for kind in sorted(each, key=lambda k: -each[k]))
    how = (
        f"the median of {len(runs)} runs: {', '.join(f'{total:.1f}' for total in totals)} ms; "
        f"{tasks * samples} rollouts in {seconds:.0f} s, start-up of all processes included; user and system "
        f"time for each rollout: {text}; looked at every {LOOK_SECONDS * 1e3:.0f} ms, so bwrap and commands, "
        f"which may live shorter, take at least this"
    )
    engine = Baseline("the embedded engine's processor time for each rollout in the same run", each[ENGINE])
    return [Measurement("own_cpu_per_rollout", middle, engine, how)]


async def _run(tasks: int, samples: int) -> tuple[float, dict[str, float]]:
    """Run the quickstart; return its seconds, and the milliseconds of a rollout in each kind of process."""
    begin = time.perf_counter()
    totals = await _quickstart(tasks, samples)
    seconds = time.perf_counter() - begin
    missing = [kind for kind in (*OWN, ENGINE) if kind not in totals]
    if missing:
        raise ProgramFailed(f"no process of these kinds was seen: {', '.join(missing)}")
    return seconds, {kind: total * 1e3 / (tasks * samples) for kind, total in totals.items()}
