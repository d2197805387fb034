"""The commands of docs/first-task.md, in their order, in one shell: tasks and a reward of one's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_testing.checkout import ROOT
from rollyard_testing.pace import patience

PAGE = (ROOT / "docs/first-task.md").read_text()
BLOCK = re.compile(r"(?:<!-- plugin: (\S+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)

pytestmark = [pytest.mark.usefixtures("bubblewrap_works"), pytest.mark.demos, pytest.mark.nightly]


def script() -> str:
    """Return the page's commands as a script, which appends to files what the page says is appended."""
    parts = ["set -e"]
    for file, language, text in BLOCK.findall(PAGE):
        if file:
            parts.append(f"cat >> {file} <<'END'\n\n\n{text}END")
        elif not language:
            # A port of the kernel's choice, because others may run beside this.
            text = text.replace("rollyard up ", "rollyard up --port 0 ").replace("--steps 8", "--steps 2")
            # A second run after a change of the job has nothing of the first one.
            again = "python train.py\nsed -i 's/maxTurns: 8/maxTurns: 7/' job.yaml\npython train.py"
            parts.append(text.replace("python train.py", again))
    return "\n".join(parts)


def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    home = tmp_path / "home"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-c", script()], cwd=tmp_path, capture_output=True, text=True, timeout=patience(300),
            env={**os.environ, "PATH": path, "ROLLYARD_HOME": str(home), "CHECKOUT": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        subprocess.run([sys.executable, "-m", "rollyard", "down", "--home", str(home)], check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 reference solutions get the reward 1" in done.stdout
    assert re.findall(r"rolloutjob/(\S+) submitted \(16 rollouts\)", done.stdout) == [
        "my-tasks",
        "my-tasks-2",
        "after",
    ]
    assert re.findall(r"^step (\d): 16 rollouts, mean reward", done.stdout, re.MULTILINE) == ["0", "1"] * 2
    # The trainer with an optimizer took its steps on the page's tasks.
    assert re.findall(r"^step   (\d)  success", done.stdout, re.MULTILINE) == ["1", "2"]
    # The handler that the page appends to the file grades the two answers.
    assert "NotANumber" in done.stdout
    assert re.search(r"\b0\.5\b", done.stdout)
    rewards = {
        json.loads(line)["id"] for line in (tmp_path / "my-tasks/tasks.jsonl").read_text().splitlines()
    }
    assert rewards == {"count", "find", "fix", "files"}
