"""Metrics go to JSON lines, and to TensorBoard where it is installed. Curves are drawn from the lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tinygrpo.curve import draw, read_curve
from tinygrpo.metrics import Metrics


def write(folder: Path) -> None:
    metrics = Metrics(folder)
    metrics.write(0, {"held_out": {"success": 0.4}})
    metrics.write(
        1, {"success": 0.5, "wall_seconds": 60.0, "policy_version": "run-1", "seconds": {"train": 2.0}}
    )
    metrics.write(1, {"success": 0.6, "wall_seconds": 90.0})
    metrics.write(2, {"success": 0.8, "wall_seconds": 120.0})
    metrics.write(2, {"held_out": {"success": 0.9}})
    assert {step: line["wall_seconds"] for step, line in metrics.steps().items()} == {1: 90.0, 2: 120.0}
    metrics.close()


def test_each_step_is_a_line(tmp_path: Path) -> None:
    write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 1, 2, 2]
    assert lines[1]["policy_version"] == "run-1"
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_tensorboard_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert not (tmp_path / "tensorboard").exists()


def test_a_curve_is_read_and_drawn(tmp_path: Path) -> None:
    write(tmp_path)
    curve = read_curve(tmp_path, "seed 0")
    assert curve.minutes == (1.5, 2.0)
    assert curve.success == (0.6, 0.8)
    assert curve.held_out == ((0.0, 0.4), (2.0, 0.9))
    first, second = tmp_path / "a" / "curve.svg", tmp_path / "b.svg"
    draw([curve, curve], first, "title")
    draw([curve, curve], second, "title")
    assert "minutes of training" in first.read_text()
    assert first.read_bytes() == second.read_bytes()


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    write(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    (tmp_path / "metrics.jsonl").write_bytes(whole + b'{"step": 3, "succ')
    metrics = Metrics(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    assert list(metrics.steps()) == [1, 2]
    metrics.close()
