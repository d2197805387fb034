"""Ten tasks from real source distributions, in both layouts: solved, untouched, and cheated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import Task, parse_lines
from rollyard_crds.rolloutjob import TaskSource
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.swelab import SweLab, swe_lab

ROOT = Path(__file__).resolve().parents[2]
RECIPES: list[dict[str, Any]] = json.loads((ROOT / "examples/swe/recipes.json").read_text())

# The distributions are fetched once, and pip builds what their metadata needs.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Task]]:
    """Return the tasks of each layout. pip fetches the distributions, once for this machine."""
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for layout in ("v5", "rebench"):
        out = folder / f"{layout}.jsonl"
        command = [sys.executable, str(ROOT / "scripts/swe_tasks.py"), "write", str(out), "--layout", layout]
        subprocess.run(command, check=True, timeout=patience(600))
        lines = out.read_text().splitlines()
        found[layout] = parse_lines(lines, TaskSource(url="x", format="swebench"))
    return found


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


@pytest.mark.parametrize("place", range(10))
async def test_a_task(lab: SweLab, written: dict[str, list[Task]], place: int) -> None:
    recipe = RECIPES[place]
    tests = " ".join(f"repo/{file}" for file in recipe["tests"])
    for number, (layout, tasks) in enumerate(written.items()):
        assert tasks[place].swe is not None
        solved = await lab.rollout(tasks[place])
        assert (solved.reward, solved.reward_reason) == (1.0, ""), (recipe["project"], layout)
        # The layouts differ in how a result is read, so each cheat is tried in both, on every other task.
        cheats = (f"rm -r {tests}", forging(recipe))
        for command in ("true", cheats[(place + number) % 2]):
            result = await lab.rollout(playing(tasks[place], command))
            assert result.reward == 0.0, (recipe["project"], layout, command)
