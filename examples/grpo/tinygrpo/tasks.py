"""The tasks: an endless supply for training, and a fixed held-out set that shares no file with it.

Both come from the templates of examples/tiny-policy. Each text of a task's files belongs to one side, which a
hash of the text decides (`tinypolicy.tasks.side_of`): a training task holds training texts only, a held-out
task holds held-out texts only. The held-out set is the quickstart's, and the policy was not pretrained on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tinygrpo.errors import TrainingError
from tinypolicy.tasks import Task, draw
from tinypolicy.templates import TEMPLATES

HELD_OUT: Final = Path(__file__).resolve().parents[2] / "quickstart" / "tasks.jsonl"

TaskRecord = dict[str, Any]


def training_tasks(seed: int, start: int = 0) -> Iterator[TaskRecord]:
    """Yield training tasks without end, the templates in turn; equal arguments give equal tasks.

    Args:
        seed: Another seed gives other tasks. The demonstrations that the policy was pretrained on were
            drawn with other seeds.
        start: The number of the first task. A trainer that resumes continues with the next number.
    """
    flat = [(family, name, one) for family, members in TEMPLATES.items() for name, one in members.items()]
    index = start
    while True:
        family, name, template = flat[index % len(flat)]
        draft = draw(template, random.Random(f"grpo/{seed}/{name}/{index}"), "train")
        yield Task(f"train-{index:06d}", family, name, draft).record()
        index += 1


def held_out_tasks(count: int | None = None) -> list[TaskRecord]:
    """Return the held-out tasks, or the first `count` of them; their templates come in turn.

    Raises:
        TrainingError: There are fewer than `count`.
    """
    tasks: list[TaskRecord] = [json.loads(line) for line in HELD_OUT.read_text().splitlines() if line.strip()]
    if count is not None and count > len(tasks):
        raise TrainingError(f"there are {len(tasks)} held-out tasks, {count} were asked for")
    return tasks[:count]
