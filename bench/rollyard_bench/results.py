"""One measured figure, its goal and its baseline; the result file and the printed table."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, StrictBool, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

NOT_MEASURED = "not measured: "
REASON_CHARACTERS = 130
"""How much of a reason the table shows. The file has all of it."""
Text = Annotated[str, Field(pattern=r"\S")]
Number = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure has to reach: a limit on its `value` or on its `ratio` to the baseline."""

    on: Literal["value", "ratio"]
    op: Literal["<=", ">="]
    limit: float
    what: str
    """The goal for readers, such as `≤ 0.6 ms`."""

    def met(self, value: float, ratio: float | None) -> bool:
        """Return whether the goal is reached. A ratio that could not be taken reaches nothing."""
        measured = value if self.on == "value" else ratio
        if measured is None:
            return False
        return measured <= self.limit if self.op == "<=" else measured >= self.limit


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run that a group of figures may know."""

    quick: bool
    """If true, there are fewer samples and shorter runs, but the same figures and goals."""


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """What the figure is compared with; `value` is in the figure's unit."""

    name: Text
    value: Number


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a group measured for one figure."""

    figure: str
    value: float | None
    """The value is None where this figure alone misses something, such as its baseline's program."""
    baseline: Baseline | None
    how: str
    """How it was measured, or what is missing."""


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One line of results.json.

    Raises:
        ValidationError: A text is empty, or a number is not a positive one.
    """

    name: Text
    value: Number | None
    """The value is None where something is missing or the measurement failed; `how` then says what."""
    unit: Text
    baseline: Baseline | None
    ratio: Number | None
    goal: Text
    met: StrictBool | None
    """Without a value, this is False for a failure, and None where something is missing."""
    how: Text
    seconds: float | None = None
    """How long the group of this figure took, in seconds, all of its figures together; None where it was not
    recorded.
    """


_ENTRIES = TypeAdapter(list[Entry])


def write(entries: list[Entry], path: Path) -> None:
    """Write results.json in one step, so a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(_ENTRIES.dump_json(entries, indent=2) + b"\n")
    os.replace(partial, path)


def read(path: Path) -> list[Entry]:
    """Return the entries of a file that `write` wrote, or an empty list where there is no file.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        return _ENTRIES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError as error:
        raise ValueError(f"{path}: is not a result file: {error}") from error


def not_measured(entry: Entry) -> bool:
    """Return whether the figure needs something that is missing, so that nothing was measured."""
    return entry.value is None and entry.met is None


def summary(entries: Sequence[Entry]) -> str:
    """Return how the figures came out."""
    met, missed = (sum(entry.met is verdict for entry in entries) for verdict in (True, False))
    return (
        f"{len(entries)} figures: {met} goals met, {missed} missed, "
        f"{sum(map(not_measured, entries))} not measured"
    )


def _short(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def table(entries: Sequence[Entry]) -> Table:
    """Return the entries as a table for readers."""
    grid = Table(title="Rollyard beside its baselines", title_justify="left", expand=False)
    for title in ("figure", "measured", "baseline", "ratio", "goal", "met"):
        grid.add_column(title, justify="right" if title in {"measured", "ratio"} else "left")
    for entry in entries:
        measured, beside = _short(entry.value, entry.unit), "-"
        if entry.baseline is not None:
            beside = f"{_short(entry.baseline.value, entry.unit)} ({entry.baseline.name})"
        elif not_measured(entry):
            reason = entry.how.removeprefix(NOT_MEASURED)
            measured = "not measured"
            beside = escape(textwrap.shorten(reason, REASON_CHARACTERS, placeholder=" …"))
        met = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[entry.met]
        ratio = "-" if entry.ratio is None else f"{entry.ratio:.3g}"
        grid.add_row(entry.name, measured, beside, ratio, entry.goal, met)
    return grid


def show(entries: Sequence[Entry], console: Console) -> None:
    """Print the table, then the reason of every goal that was missed."""
    console.print(table(entries))
    for entry in entries:
        if entry.met is False:
            console.print(f"[red]missed[/] {entry.name}: {escape(entry.how)}", highlight=False)
