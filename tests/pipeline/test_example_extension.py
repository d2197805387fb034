"""The package of examples/extension, installed into a folder, and run through whole jobs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "extension"
MODULES = sorted(path for path in (EXAMPLE / "word_count").glob("*.py") if path.name != "__init__.py")
TASKS = [json.loads(line) for line in (EXAMPLE / "tasks.jsonl").read_text().splitlines()]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip has installed the package, from what is on this machine."""
    target = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--disable-pip-version-check", "--root-user-action=ignore", "--target", str(target), str(EXAMPLE)],
        check=True, timeout=patience(120),
    )  # fmt: skip
    return target


def test_each_part_is_about_twenty_lines() -> None:
    assert len(MODULES) == 5
    lengths = {path.name: len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > 28} == {}


def test_the_reference_solutions_are_right() -> None:
    for task in TASKS:
        (path, text), *others = task["sandbox"]["files"].items()
        assert others == []
        assert path in task["prompt"]
        assert task["answer"] == str(len(text.split()))


async def rollyard(installed: Path, *arguments: str) -> str:
    """Return the output of a `rollyard` command that finds the installed package."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", *arguments,
        env={**os.environ, "PYTHONPATH": str(installed)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(patience(150)):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def quickstart(
    installed: Path, out: Path, job: str, samples: int, *further: str
) -> list[dict[str, Any]]:
    """Return the trajectories of a job of the example."""
    await rollyard(
        installed, "quickstart", "--job", str(EXAMPLE / job), "--out", str(out),
        "--tasks", str(len(TASKS)), "--samples", str(samples), *further,
    )  # fmt: skip
    trajectories = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    assert len(trajectories) == len(TASKS) * samples
    return trajectories


@pytest.mark.parametrize("job", ["job.yaml", "oracle.yaml"])
@pytest.mark.nightly
async def test_the_jobs_are_valid_where_the_package_is_installed(installed: Path, job: str) -> None:
    output = await rollyard(installed, "validate", "-f", str(EXAMPLE / job))
    assert "not installed" not in output
    assert f"{len(TASKS)} tasks" in output


@pytest.mark.usefixtures("bubblewrap_works")
@pytest.mark.nightly
async def test_handler_and_tool_score_the_reference_solutions(installed: Path, tmp_path: Path) -> None:
    trajectories = await quickstart(installed, tmp_path / "out", "oracle.yaml", 1)
    assert {trajectory["task_id"]: trajectory["reward"] for trajectory in trajectories} == {
        task["id"]: 1.0 for task in TASKS
    }


def policy(prompt: str) -> str:
    """Call wrongly, then rightly, and state the number twice; for one file the last statement is wrong."""
    turn = prompt.count("<|im_start|>assistant") - 1
    asked = re.search(r"does the file (\S+) have", prompt)
    if asked is None:  # This is a probe of the server.
        return f"1{END}"
    if turn == 0:
        return f"@words {asked[1]}{END}"
    if turn == 1:
        return f'Once more.\n@words {{"path": "{asked[1]}"}}{END}'
    counted = re.findall(rf"(\d+) {re.escape(asked[1])}", prompt)[-1]
    if turn == 2:
        return f"It has {counted} words.{END}"
    return f"The number is {int(counted) + (asked[1] == 'empty.txt')}.{END}"


@pytest.mark.usefixtures("bubblewrap_works")
async def test_all_five_parts_in_one_job(
    installed: Path, tmp_path: Path, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path
) -> None:
    model = scripted(policy)
    model.card["root"] = str(model_folder)
    async with model.serving():
        trajectories = await quickstart(
            installed, tmp_path / "out", "job.yaml", 2, "--backend", model.url, "--model", "scripted"
        )
    for trajectory in trajectories:
        right = 0.5 if trajectory["task_id"] == "empty" else 1.0
        assert trajectory["reward"] == right + 0.25
        characters = trajectory["reward_components"].pop("characters")
        assert characters == len(trajectory["messages"][-1]["content"])
        assert trajectory["reward_components"] == {"answered": 1.0, "handler": right, "function": 1.0}
        roles = [message["role"] for message in trajectory["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "user", "assistant"]
        wrong, right = [m["content"] for m in trajectory["messages"] if m["role"] == "tool"]
        assert wrong.startswith("error: malformed tool call: ")
        assert re.match(r"\d+ \S+", right)
        assert sum(sum(segment["loss_mask"]) for segment in trajectory["segments"]) > 0
