"""What stands around examples/grpo: the trainer's environment, and the check of `make demo-train`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def test_the_environment_has_what_the_light_client_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = set(re.findall(r'"([^"\s]+>=[^"\s]+)"', (ROOT / "scripts/train-env").read_text()))
    assert set(project["dependencies"]) <= listed


def test_an_environment_without_torch_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/train-env"], env={"TRAIN_PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "lacks a package" in done.stderr


def test_an_unknown_extra_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts/train-env", "all"], capture_output=True, text=True, timeout=patience(60)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage" in done.stderr


def trajectory(place: int, reward: float | None, version: str) -> Row:
    segment = {"policy_versions": ["", version], "loss_mask": [0, 1]}
    return {"id": str(place), "reward": reward, "segments": [segment]}


def write_lines(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of two steps that is as it should be."""
    folder = tmp_path / "seed-0"
    folder.mkdir()
    for name, step, good in (("before", 0, 40), ("after", 2, 80)):
        rows = [trajectory(place, float(place < good), f"seed-0-{step}") for place in range(100)]
        write_lines(folder / f"held-out-{name}.jsonl", rows)
    steps = [
        {
            "update": {"fresh_ratio_error": 1e-5, "old_tokens": 0.0}, "step": step, "success": 0.5,
            "policy_version": f"seed-0-{step}", "rollouts": 64, "lag": {"max": 0},
        }
        for step in (1, 2)
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", [{"step": 0, "held_out": {"success": 0.4}}, *steps])
    summary = {
        "seeds": [0], "steps": [2], "success_before": [0.4], "success_after": [0.8], "wall_seconds": [60.0],
        "rollouts": [128],
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "curve.svg").write_text("<svg></svg>")
    return tmp_path


def check(run: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/check-demo-train", run],
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    return done.returncode, done.stderr


def test_a_good_run_passes(run: Path) -> None:
    assert check(run) == (0, "")


def changed_line(file: str, place: int, change: Callable[[Row], None]) -> Callable[[Path], None]:
    """Return a function that changes one line of a file of the run."""

    def apply(run: Path) -> None:
        rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
        change(rows[place])
        write_lines(run / file, rows)

    return apply


def changed_summary(column: str, values: list[Any]) -> Callable[[Path], None]:
    """Return a function that replaces a column of the summary."""

    def apply(run: Path) -> None:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, column: values}))

    return apply


def not_risen(run: Path) -> None:
    rows = [trajectory(place, float(place < 45), "seed-0-2") for place in range(100)]
    write_lines(run / "seed-0/held-out-after.jsonl", rows)
    changed_summary("success_after", [0.45])(run)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (not_risen, "rises by less"),
        (changed_summary("success_after", [0.9]), "success after, not 0.8"),
        (changed_summary("rollouts", [127]), "rollouts, not 128"),
        (changed_summary("steps", [3]), "steps, not 1 to 3"),
        (changed_summary("seeds", [0, 1]), "not one a seed"),
        (
            changed_line(
                "seed-0/held-out-after.jsonl", 7, lambda row: row.update(trajectory(7, 1.0, "seed-0-1"))
            ),
            "versions after",
        ),
        (
            changed_line("seed-0/held-out-before.jsonl", 0, lambda row: row.update(reward=None)),
            "without a reward",
        ),
        (
            changed_line("seed-0/metrics.jsonl", 1, lambda row: row["update"].update(fresh_ratio_error=0.01)),
            "importance ratios",
        ),
        (
            changed_line("seed-0/metrics.jsonl", 1, lambda row: row["update"].update(old_tokens=0.1)),
            "old tokens",
        ),
        (
            changed_line("seed-0/metrics.jsonl", 2, lambda row: row.update(policy_version="x-2")),
            "policy versions",
        ),
        (lambda run: (run / "curve.svg").unlink(), "no picture"),
    ],
)
def test_what_is_wrong_is_found(run: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(run)
    status, found = check(run)
    assert status == 1
    assert said in found
