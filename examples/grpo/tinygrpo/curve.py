"""The learning curve of one run or several, as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

_GOAL: Final = 0.85
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""The palette of Okabe and Ito, whose colours people with any colour vision can tell apart."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The measurements of one run: the minutes at the end of each step, and its success in training."""

    label: str
    minutes: tuple[float, ...]
    success: tuple[float, ...]
    held_out: tuple[tuple[float, float], ...]
    """Minutes and success of each evaluation."""


def read_curve(folder: Path, label: str) -> Curve:
    """Return the curve of a run from its `metrics.jsonl`. The last line of a repeated step counts."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    steps = {line["step"]: line for line in lines if "success" in line}
    ends = {0: 0.0} | {number: line["wall_seconds"] / 60 for number, line in steps.items()}
    evaluated = {line["step"]: line["held_out"]["success"] for line in lines if "held_out" in line}
    ordered = sorted(steps)
    return Curve(
        label,
        tuple(ends[number] for number in ordered),
        tuple(steps[number]["success"] for number in ordered),
        tuple((ends[number], evaluated[number]) for number in sorted(evaluated) if number in ends),
    )


def draw(curves: Sequence[Curve], path: Path, title: str, goal: float = _GOAL) -> None:
    """Draw curves into an SVG file: training as lines, held-out tasks as circles."""
    # The labels stay text, and equal curves give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rollyard", "font.size": 10}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.subplots()
        for place, curve in enumerate(curves):
            colour = _COLOURS[place % len(_COLOURS)]
            axes.plot(curve.minutes, curve.success, color=colour, linewidth=1.5, label=curve.label)
            if curve.held_out:
                minutes, success = zip(*curve.held_out, strict=True)
                axes.plot(minutes, success, "o", color=colour, markersize=7, markeredgecolor="black")
        axes.axhline(goal, color="#555555", linewidth=0.8, linestyle="--")
        axes.set(xlabel="minutes of training", ylabel="success at temperature 1", ylim=(0, 1), title=title)
        axes.set_xlim(left=0)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(loc="lower right", title="line: training tasks\ncircle: held-out tasks")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})
