"""A pytest plugin: the level and the part of each test, its limit, and which tests share a process.

| level | what it holds |
|---|---|
| `check` | linters, types, and every test that needs no system of its own and half a second at most |
| `test` | each real system once, and what takes longer |
| `all` | everything: what carries the mark `nightly`, too |

`tests/durations.json` has the seconds of the tests that take longer. `scripts/test` runs levels.
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

from rollyard_testing.invariants import is_broken
from rollyard_testing.pace import pace

PARTS: Final = {
    "demos": "the demos, from their start to their checks",
    "kubernetes": "drives a real cluster",
    "slurm": "drives a real Slurm of four nodes, as an ordinary user",
    "apptainer": "starts real Apptainer sandboxes; runs as an ordinary user",
    "podman": "starts real Podman sandboxes; runs as root",
    "vllm": "needs the two real vLLM servers, or one of its own",
    "trainers": "needs the environment of a trainer, such as TRL",
    "harnesses": "runs harnesses as their registries have them; needs `scripts/harness-env`",
    "page": "drives the page in a real Chromium",
    "faults": "kills processes at seeded random times",
    "packaging": "builds distributions and installs them",
    "postgresql": "needs a PostgreSQL",
    "static": "linters, types and import contracts",
    "slow": "starts what takes seconds, for one test or for several",
}
"""The parts that a mark makes; a test with several belongs to the first. Others may be `slow` by their
durations; what is left is `quick`.
"""
LEVELS: Final = ("check", "test", "all")
_ONE_PROCESS: Final = ("kubernetes", "slurm", "vllm", "page", "demos")
"""Folders whose tests share what takes long to start: a process runs each. They begin first, in order."""
_SERVERS: Final = frozenset(PARTS) - {"packaging", "postgresql", "static", "slow"}
"""Parts whose fixtures start systems, and bound that: the limit of a test is for its call alone."""
_PART: Final = pytest.StashKey[str]()
QUICK_SECONDS: Final = 0.5
_DURATIONS: Final = Path(__file__).parents[2] / "durations.json"


@cache
def durations() -> dict[str, float]:
    """Return the seconds of each test that is not quick."""
    seconds: dict[str, float] = json.loads(_DURATIONS.read_text())
    return seconds


def part_of(item: pytest.Item) -> str:
    """Return the part that a test belongs to."""
    marks = {mark.name for mark in item.iter_markers()}
    named = next((part for part in PARTS if part in marks), None)
    return named or ("slow" if durations().get(item.nodeid, 0.0) > QUICK_SECONDS else "quick")


def level_of(item: pytest.Item) -> str:
    """Return the first level that runs a test."""
    if item.get_closest_marker("nightly"):
        return "all"
    return "check" if part_of(item) in ("static", "quick") else "test"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options by which `scripts/test` chooses tests and learns how they ended."""
    group = parser.getgroup("levels")
    group.addoption("--level", choices=LEVELS, default="all", help="run this level and those below it")
    group.addoption("--part", action="append", default=[], help="run this part only (repeatable)")
    group.addoption("--no-part", action="append", default=[], help="run all other parts")
    group.addoption("--outcome", type=Path, help="write how each test ended into this file, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of the parts, measure the machine, and note outcomes if they are asked for."""
    for part, what in PARTS.items():
        config.addinivalue_line("markers", f"{part}: {what}")
    config.addinivalue_line(
        "markers", "nightly: left to `make test-all`; another test shows the same every day"
    )
    config.addinivalue_line("markers", "attack: what is tried, and what stops it (adversary/defences.py)")
    pace()  # Processes that are started from here on read it.
    if config.getoption("--outcome") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcome")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests that are asked for, with their limits, in the order in which processes take them.

    Hooks of conftest.py files that give marks are first, too, and come before it.
    """
    level, parts, other = (config.getoption(name) for name in ("--level", "--part", "--no-part"))
    wanted, left_out = [], []
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    weights: dict[str, float] = defaultdict(float)
    for item in items:
        part = part_of(item)
        chosen = LEVELS.index(level_of(item)) <= LEVELS.index(level)
        if not chosen or (parts and part not in parts) or part in other:
            left_out.append(item)
            continue
        wanted.append(item)
        item.stash[_PART] = part
        # Nobody knows how long a new test of a whole system takes.
        seconds = durations().get(item.nodeid, 60.0 if part in _SERVERS else 0.1)
        limit = min(max(10 * seconds, 60.0), 600.0) * pace()
        item.add_marker(pytest.mark.timeout(limit, func_only=part in _SERVERS))
        group = group_of(item.nodeid)
        groups[group].append(item)
        weights[group] += seconds

    def turn(group: str) -> tuple[int, float]:
        first = _ONE_PROCESS.index(group) if group in _ONE_PROCESS else len(_ONE_PROCESS)
        return first, -weights[group]

    items[:] = [item for group in sorted(groups, key=turn) for item in groups[group]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def group_of(nodeid: str) -> str:
    """Return what a test shares a process with: a whole system's folder, its file, or nothing."""
    path = nodeid.partition("::")[0]
    folder = path.split("/")[1]
    # Tests that kill processes have nothing in common; a file's other tests share what its fixtures start.
    return folder if folder in _ONE_PROCESS else nodeid if folder == "faults" else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that hands out these groups. (xdist's own groups by mark fail with pytest 9.2.)"""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):  # type: ignore[misc]
        assigned_work: Any

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def remove_node(self, node: Any) -> str | None:
            # A test that ended its process has failed. xdist would give it to the next one, which ends, too.
            units, others = self.assigned_work[node], {**self.assigned_work}
            self.assigned_work = {node: others.pop(node)}
            crashed: str | None = super().remove_node(node)
            self.assigned_work = others
            if crashed is not None:
                unit = units[group_of(crashed)]
                unit[crashed] = True
                if all(unit.values()):
                    del self.workqueue[group_of(crashed)]
                for other in others:
                    self._reschedule(other)
            return crashed

    return ByGroup(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """End a whole system with its last test: idle servers would take a third of a core from the others."""
    group = group_of(item.nodeid)
    if group not in _ONE_PROCESS or nextitem is None or group_of(nextitem.nodeid) == group:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _processor_seconds() -> float:
    """Return what this process and its ended children have taken so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a report say the test's part, its processor time so far, and whether an invariant is broken."""
    report = yield
    report.part, report.processor = item.stash[_PART], _processor_seconds()  # type: ignore[attr-defined]
    report.broken = call.excinfo is not None and is_broken(call.excinfo.value)  # type: ignore[attr-defined]
    return report


class _Outcomes:
    """The file with a line for each test that ran, whatever process it ran in."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)
        self._processor: dict[str, float] = defaultdict(float)
        self._running: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase to its test, and write the test's line with its last phase."""
        nodeid = report.nodeid
        row = self._running.setdefault(
            nodeid, {"id": nodeid, "outcome": "passed", "broken": False, "seconds": 0.0, "call": 0.0}
        )
        row["seconds"] += report.duration
        row["broken"] |= getattr(report, "broken", False)
        if report.when == "call":
            row["call"] = report.duration
        if report.outcome != "passed":
            row |= {"outcome": report.outcome, "when": report.when, "text": report.longreprtext}
            if report.skipped and isinstance(report.longrepr, tuple):
                row["text"] = report.longrepr[2].removeprefix("Skipped: ")
            row["cause"] = _cause(report)
            if report.failed:
                row["output"] = "\n".join(f"-- {name}\n{text}" for name, text in report.sections)
        if report.when == "teardown" or not hasattr(report, "part"):
            worker = getattr(report, "worker_id", "")
            now = getattr(report, "processor", self._processor[worker])
            row["part"] = getattr(report, "part", "quick")
            row["processor"], self._processor[worker] = now - self._processor[worker], now
            self._file.write(json.dumps(self._running.pop(nodeid)) + "\n")


def _cause(report: pytest.TestReport) -> str:
    """Return what errors of one broken fixture have in common."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext[-500:]
