"""The benchmark's command line, which runs the groups one by one, judges, prints and writes."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from rollyard_bench import results
from rollyard_bench.processes import Missing, unwind
from rollyard_bench.registry import FIGURES, failed, judge, missing, selected
from rollyard_bench.results import Entry, Measurement, Settings

GROUP_SECONDS = 1500.0

_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

Measure = Callable[[Settings], Coroutine[Any, Any, list[Measurement]]]


def _load(group: str) -> Measure:
    """Return the group's `measure`.

    It is imported late, because one group's missing part must not stop the others.
    """
    measure: Measure = importlib.import_module(f"rollyard_bench.{group}").measure
    return measure


async def _bounded(group: str, settings: Settings) -> list[Measurement]:
    async with asyncio.timeout(GROUP_SECONDS):
        return await _load(group)(settings)


def _cause(error: BaseException) -> str:
    """Return one line of an error; for an exception group, that of its first leaf."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:1500]


def run_group(group: str, settings: Settings) -> list[Entry]:
    """Return all result lines of one group. Whatever goes wrong inside becomes lines that are not met, and
    whatever is missing becomes lines without a verdict.
    """
    figures = [figure for figure in FIGURES if figure.group == group]
    try:
        # This is the loop that the stage workers run on.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = {item.figure: item for item in runner.run(_bounded(group, settings))}
        return [
            judge(figure, measured[figure.name])
            if figure.name in measured
            else failed(figure, "its group gave no number for it")
            for figure in figures
        ]
    except Missing as error:
        return [missing(figure, " ".join(str(error).split())) for figure in figures]
    except TimeoutError as error:
        return [failed(figure, str(error) or f"took longer than {GROUP_SECONDS:.0f} s") for figure in figures]
    except Exception as error:
        return [failed(figure, _cause(error)) for figure in figures]


def _merged(before: list[Entry], entries: list[Entry]) -> list[Entry]:
    """Return the new entries and, for figures without one, the former, in the registry's order."""
    by_name = {entry.name: entry for entry in (*before, *entries)}
    return [by_name[figure.name] for figure in FIGURES if figure.name in by_name]


@contextmanager
def shared_evenly() -> Iterator[bool]:
    """Share the cores by process instead of by session (sched(7), autogroup), where that is permitted.

    Every program here has a session of its own. On some virtual machines a session that wakes up waits
    seconds for a core beside a busy one, and both sides of a comparison would measure that. The block gets
    whether the cores are shared so.
    """
    try:
        before = _AUTOGROUP.read_text()
        _AUTOGROUP.write_text("0")
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        _AUTOGROUP.write_text(before)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser(prog="bench/run.py", description="Measure Rollyard beside its baselines.")
    parse.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="groups or figures (a figure runs its group); the file keeps the others",
    )
    parse.add_argument("--quick", action="store_true", help="fewer samples, shorter runs (about 15 minutes)")
    parse.add_argument("--out", type=Path, default=Path("bench/results.json"), metavar="FILE")
    return parse


def main(arguments: list[str] | None = None) -> int:
    """Measure, write after each group, and print.

    Return 0 if all goals whose figures could be measured are met, 1 if some are missed, and 2 for bad
    arguments.

    Raises:
        SystemExit: SIGINT or SIGTERM came. The file holds the groups that were complete before.
    """
    options = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        groups = selected(options.only)
        before = results.read(options.out)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, unwind)
    # Where the machine's configuration forbids bytecode, each process that a figure is about would compile
    # its sources, which no user's would do.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    entries: list[Entry] = []
    left = list(groups)
    begin = time.monotonic()
    try:
        with shared_evenly():
            for group in groups:
                started = time.monotonic()
                console.print(f"bench: {group} …", style="dim", highlight=False)
                measured = run_group(group, Settings(quick=options.quick))
                took = round(time.monotonic() - started, 1)
                entries += [replace(entry, seconds=took) for entry in measured]
                results.write(_merged(before, entries), options.out)
                left.remove(group)
                console.print(f"bench: {group}: {took:.1f} s", style="dim", highlight=False)
    finally:
        results.show(entries, console)
        console.print(f"{results.summary(entries)}; {time.monotonic() - begin:.0f} s; {options.out}")
        if left:
            console.print(f"interrupted: {options.out} keeps the former figures of {', '.join(left)}")
    return 1 if any(entry.met is False for entry in entries) else 0
