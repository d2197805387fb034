"""Functions that read trajectories from files with JSON lines or Parquet, and that select one to show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from rollyard_crds.reading.manifest import describe
from rollyard_crds.trajectory import RescoredTrajectory, Trajectory
from rollyard_process import hub

from rollyard.errors import InvalidInput, LookupFailed
from rollyard.jobs.manifests import text_file

RESCORED: Final = '"rescored":'
"""The text in each line of a file that `rollyard rescore` wrote."""
JSON_COLUMNS: Final = frozenset(
    {
        "reward_components",
        "messages",
        "turns",
        "sampling",
        "timings",
        "metadata",
        "branches",
        "harness",
    }
)


def read_file(path: Path) -> Iterator[Trajectory]:
    """Yield every trajectory of a file that `rollyard trajectories` or the quickstart wrote.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: The file holds something else. The message names the line and the field.
    """
    if not path.is_file():
        raise LookupFailed(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[Trajectory]:
    with text_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield (RescoredTrajectory if RESCORED in line else Trajectory).model_validate_json(line)
            except ValidationError as error:
                raise InvalidInput(f"{path}: line {number}: {describe(error, 'trajectory')[0]}") from error


def _parquet(path: Path) -> Iterator[Trajectory]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: not a Parquet file: {error}") from error
    with file:
        for batch in file.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                yield _from_row(row, path)


def _from_row(row: dict[str, Any], path: Path) -> Trajectory:
    # Columns without a fixed schema hold JSON text in Parquet.
    present = {name: value for name, value in row.items() if value is not None}
    for name in JSON_COLUMNS & present.keys():
        present[name] = json.loads(present[name])
    try:
        return Trajectory.model_validate(present)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {describe(error)[0]}") from error


def find(trajectories: Iterator[Trajectory], rollout: str) -> Trajectory:
    """Return the trajectory with this id, or the only one whose id ends with it or whose task has it.

    Raises:
        LookupFailed: There is no such trajectory, or there are several.
    """
    matches = []
    for trajectory in trajectories:
        if trajectory.id == rollout:
            return trajectory
        if trajectory.id.endswith(rollout) or trajectory.task_id == rollout:
            matches.append(trajectory)
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(trajectory.id for trajectory in matches[:8])
        raise LookupFailed(
            f"{rollout!r} fits {len(matches)} rollouts: {ids}{', …' if len(matches) > 8 else ''}"
        )
    raise LookupFailed(f"no rollout {rollout!r}; `rollyard view NAME --list` lists them")


def tokenizer_of(path: Path) -> Path | None:
    """Return the folder of the tokenizer that `tokenizer.txt` beside a trajectory file names, if any."""
    try:
        file = hub.find(path.with_name("tokenizer.txt").read_text().strip())
    except OSError:
        return None
    return None if file is None else file.parent


def most_telling(trajectories: Iterator[Trajectory]) -> Trajectory | None:
    """Return the trajectory that is most useful to read first, or None if there is none.

    Solved ones are preferred, and then those with more turns, up to three. Of equally useful ones, the
    earliest is returned.
    """
    best: Trajectory | None = None
    rank = (-1, -1)
    for trajectory in trajectories:
        score = (int((trajectory.reward or 0.0) > 0), min(len(trajectory.turns), 3))
        if score > rank:
            best, rank = trajectory, score
    return best
