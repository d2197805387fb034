"""Ten tasks from real source distributions, in both layouts: solved, untouched, and cheated."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.task_list import parse_lines
from rollyard_testing.invariants import deserves_nothing
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.swelab import SweLab, swe_lab

ROOT = Path(__file__).resolve().parents[2]
RECIPES: list[dict[str, Any]] = json.loads((ROOT / "examples/swe/recipes.json").read_text())

DAILY = 2
"""The number of repositories that are played every day, the first ones; the night plays all."""


def tasks_of(project: str, folder: Path) -> dict[str, Task]:
    """Return a project's task in each layout. pip fetches the distribution once for this machine, and builds
    what its metadata needs.
    """
    tasks = {}
    for layout in ("v5", "rebench"):
        out = folder / f"{layout}.jsonl"
        command = [sys.executable, str(ROOT / "scripts/swe_tasks.py"), "write", str(out), "--layout", layout]
        subprocess.run([*command, "--only", project], check=True, timeout=patience(600))
        source = TaskSource(url="x", format="swebench")
        (tasks[layout],) = parse_lines(out.read_text().splitlines(), source)
    return tasks


@pytest.fixture
async def lab(bubblewrap_works: None, tmp_path: Path) -> AsyncIterator[SweLab]:
    async with swe_lab("bubblewrap", tmp_path) as found:
        yield found


def playing(task: Task, command: str) -> Task:
    """Return the task with another solution."""
    calls = [{"name": "bash", "arguments": {"command": command}}]
    return Task.model_validate({**task.model_dump(exclude_none=True), "solution": calls})


def forging(recipe: dict[str, Any]) -> str:
    """Return a command that makes the repository print good results, and end the tests."""
    tests = [*recipe["fail_to_pass"], *recipe["pass_to_pass"]]
    lines = "\n".join(["", ">>>>> Start Test Output", *(f"PASSED {test}" for test in tests), ""])
    end = ">>>>> End Test Output\n>>>>> Test Exit Code: 0\n"
    code = f"import os\nos.write(1, {(lines + end).encode()!r})\nos._exit(0)\n"
    return f"cat >> repo/{recipe['bug']['path']} <<'ENDOFCODE'\n{code}ENDOFCODE"


def test_there_are_ten() -> None:
    assert len({recipe["project"] for recipe in RECIPES}) == len(RECIPES) == 10


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=pytest.mark.nightly if place >= DAILY else [], id=recipe["project"])
        for place, recipe in enumerate(RECIPES)
    ],
)
async def test_a_task(lab: SweLab, tmp_path: Path, place: int) -> None:
    recipe = RECIPES[place]
    tests = " ".join(f"repo/{file}" for file in recipe["tests"])
    tasks = await asyncio.to_thread(tasks_of, recipe["project"], tmp_path)
    for number, (layout, task) in enumerate(tasks.items()):
        solved = await lab.rollout(task)
        assert (solved.reward, solved.reward_reason) == (1.0, ""), layout
        # The layouts differ in how a result is read, so each cheat is tried in both, on every other task.
        cheats = (f"rm -r {tests}", forging(recipe))
        for command in ("true", cheats[(place + number) % 2]):
            result = await lab.rollout(playing(task, command))
            deserves_nothing(result.reward)
