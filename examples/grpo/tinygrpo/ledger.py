"""The ledger of a run: which rollouts each step has read, and what for.

Each checkpoint holds the file `used.jsonl` with one line for each group that its step has read. It is written
together with the weights, so the ledger of a run, which is these files one after the other, always agrees
with the weights: a group stands in it exactly if the newest weights, or earlier ones, have seen it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from rollyard import Group

from tinygrpo.errors import CheckpointError

FILE: Final = "used.jsonl"

Use = Literal["trained", "uninformative", "stale", "dropped"]
"""What a step did with a group: trained on it, or passed over it, because all rewards were equal, a token was
too old, or the control plane dropped the group, of which too few rollouts have a reward.
"""


@dataclass(frozen=True, slots=True)
class UsedGroup:
    """A line of the ledger."""

    step: int
    use: Use
    group: str
    """The id of the group."""
    task: str
    rollouts: list[str]
    """The ids of the rollouts that were delivered with the group."""

    @classmethod
    def of(cls, step: int, use: Use, group: Group) -> UsedGroup:
        """Return the line of a group that a step has read."""
        return cls(step, use, group.group_id, group.task_id, [one.id for one in group.trajectories])


def write_ledger(folder: Path, lines: Iterable[UsedGroup]) -> None:
    """Write the part of the ledger that belongs to the checkpoint in `folder`.

    Raises:
        OSError: The folder cannot be written.
    """
    text = "".join(f"{json.dumps(asdict(line))}\n" for line in lines)
    (folder / FILE).write_text(text, encoding="utf-8")


def read_ledger(checkpoints: Path) -> Iterator[UsedGroup]:
    """Yield the ledger of a run in the order in which the groups were read.

    Args:
        checkpoints: The folder of the run's checkpoints.

    Raises:
        CheckpointError: A part cannot be read, so it was changed after it was written.
    """
    for path in sorted(checkpoints.glob(f"step-????/{FILE}")):
        try:
            lines = [UsedGroup(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error
        yield from lines
