"""The trainer's script of docs/trainers.md, with the real engine, sandboxes and control plane."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_client import Client
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "engine/src/rollyard_engine/models/tiny-policy"

pytestmark = [pytest.mark.usefixtures("bubblewrap_works"), pytest.mark.nightly]


def run(*arguments: str | Path, home: Path) -> str:
    environment = {**os.environ, "ROLLYARD_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=home.parent, env=environment, capture_output=True, text=True,
        timeout=patience(300), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "home"
    run("-m", "rollyard", "up", "--home", folder, "--port", "0", "--detach", home=folder)
    try:
        yield folder
    finally:
        run("-m", "rollyard", "down", "--home", folder, home=folder)


def test_it_trains_and_resumes(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (ROOT / "examples/trainer/train.py").read_text()
    assert len(script.splitlines()) <= 40
    arguments = (ROOT / "examples/quickstart/tasks.jsonl", CHECKPOINT)
    state = tmp_path / "state.json"
    first = run(ROOT / "examples/trainer/train.py", *arguments, "2", state, home=home)
    assert re.findall(r"^step (\d+): reward [\d.]+, loss", first, re.MULTILINE) == ["1", "2"]
    # It resumes at the third step, and repeats it after a crash that came before the state was written.
    before = state.read_text()
    resumed = run(ROOT / "examples/trainer/train.py", *arguments, "3", state, home=home)
    assert [line.split(":")[0] for line in resumed.splitlines()] == ["step 3"]
    after = state.read_text()
    state.write_text(before)
    repeated = run(ROOT / "examples/trainer/train.py", *arguments, "3", state, home=home)
    assert repeated.split("lags ")[1] == "[1, 1, 1, 1]\n", "the third step's own weights came in between"
    assert repeated.split(", lags")[0] == resumed.split(", lags")[0]
    assert state.read_text() == after
    monkeypatch.setenv("ROLLYARD_HOME", str(home))
    with Client() as client:
        assert client.job("train").status.counts.total == 3 * 4 * 4, "no task was made twice"
        groups = list(client.groups("train"))
        assert len({group.group_id for group in groups}) == len(groups)
        assert json.loads(after)["step"] == 3
        assert [update.policy_version for update in client.weight_updates("default")] == [
            "step-3",
            "step-2",
            "step-1",
        ]
        versions = {v for g in groups for t in g.trajectories for s in t.segments for v in s.policy_versions}
        assert {"step-1", "step-2"} <= versions
