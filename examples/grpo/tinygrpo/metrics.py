"""Metrics: one JSON line a step, and TensorBoard's events where TensorBoard is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Value = float | int | str | Mapping[str, Any]


def event_writer(folder: Path) -> Any | None:
    """Return a writer of TensorBoard's events, or None if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class Metrics:
    """The metrics of one run, in the file `metrics.jsonl` and below `tensorboard`.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        _cut_torn_line(self._path)
        self._lines = self._path.open("a", encoding="utf-8")
        self._events = event_writer(folder / "tensorboard")

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the values of a step. A nested mapping becomes `name/key` in TensorBoard."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        self._lines.flush()
        if self._events is not None:
            for name, value in _scalars("", values):
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return what was written on each step of the training. The last line of a repeated step counts."""
        lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
        return {int(line["step"]): line for line in lines if "success" in line}

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._events is not None:
            self._events.close()


def _cut_torn_line(path: Path) -> None:
    """Remove what a run that was killed has written of its last line."""
    if not path.exists():
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        with path.open("r+b") as file:
            file.truncate(whole)


def _scalars(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _scalars(f"{prefix}{name}/", value)
        elif isinstance(value, (int, float)):
            found.append((f"{prefix}{name}", float(value)))
    return found
