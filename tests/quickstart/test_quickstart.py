"""The main job as a whole: `rollyard quickstart` with the real engine, sandboxes and control plane."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("bubblewrap_works")


def quickstart(out: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return summary, trajectories and terminal output of one run."""
    done = subprocess.run(
        [sys.executable, "-m", "rollyard", "quickstart", "--out", str(out), *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=patience(360), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    lines = (out / "trajectories.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines], done.stdout


def test_the_oracle_solves_every_task(tmp_path: Path) -> None:
    job = str(ROOT / "examples/quickstart/oracle.yaml")
    summary, trajectories, _ = quickstart(tmp_path / "out", "--job", job, "--samples", "1")
    tasks = [
        json.loads(line)["id"] for line in (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()
    ]
    assert len(tasks) >= 64
    assert sorted(t["task_id"] for t in trajectories) == sorted(tasks)
    assert {t["task_id"]: t["reward"] for t in trajectories} == dict.fromkeys(tasks, 1.0)
    assert summary["succeeded"] == len(tasks)
    assert summary["tokens_sampled"] == 0


def test_the_policy_samples_real_trajectories(tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary, trajectories, output = quickstart(out, "--tasks", "8", "--samples", "4")
    assert {
        "rollouts",
        "succeeded",
        "failed",
        "reward_mean",
        "groups_informative",
        "tokens_sampled",
        "wall_seconds",
    } <= set(summary)
    assert (summary["rollouts"], summary["succeeded"], summary["failed"]) == (32, 32, 0)
    assert len({(t["task_id"], t["sample_index"]) for t in trajectories}) == 32
    # It is neither hopeless nor perfect: the shipped policy leaves room to learn.
    assert 0 < summary["reward_mean"] < 1
    assert summary["tokens_sampled"] == sum(sum(s["loss_mask"]) for t in trajectories for s in t["segments"])
    for trajectory in trajectories:
        for segment in trajectory["segments"]:
            sampled = [p for p, m in zip(segment["logprobs"], segment["loss_mask"], strict=True) if m]
            assert sampled
            assert all(p <= 0 for p in sampled)
            versions = {v for v, m in zip(segment["policy_versions"], segment["loss_mask"], strict=True) if m}
            assert "" not in versions
    assert any(len(t["turns"]) > 1 for t in trajectories)
    # Samples of a task differ, because each request has a seed of its own.
    first = [
        t["segments"][0]["response_ids"] for t in trajectories if t["task_id"] == trajectories[0]["task_id"]
    ]
    assert len({tuple(ids) for ids in first}) > 1
    assert pyarrow.parquet.read_table(out / "trajectories.parquet").num_rows == 32
    assert "rollyard view" in output
