"""The tasks: an endless supply for training, and a fixed held-out set that shares no file with it.

A run may train on the tasks of a job of one's own instead. Otherwise both come from the templates of
examples/tiny-policy. Each text of a task's files belongs to one side, which a hash of the text decides
(`tinypolicy.tasks.side_of`): a training task holds training texts only, a held-out task holds held-out texts
only. The held-out set is the quickstart's, and the policy was not pretrained on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import yaml

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


@dataclass(frozen=True, slots=True)
class OwnJob:
    """A job of one's own, on whose tasks a run trains."""

    spec: dict[str, Any]
    """The manifest's spec. The trainer replaces what its own options say, such as the samples of a task."""
    tasks: list[TaskRecord]

    @classmethod
    def read(cls, manifest: Path) -> OwnJob:
        """Read a manifest and the tasks that it names: JSON lines in a file beside it, or `tasks.inline`.

        Raises:
            TrainingError: There is no such job, or it has no tasks that can be read here.
        """
        try:
            spec = yaml.safe_load(manifest.read_text())["spec"]
            source = spec["tasks"]
            if "inline" in source:
                tasks = source["inline"]
            else:
                lines = (manifest.parent / source["url"]).read_text().splitlines()
                tasks = [json.loads(line) for line in lines if line.strip()]
            named = [task for task in tasks if task["id"]]
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise TrainingError(
                f"{manifest}: must be the manifest of a job whose spec.tasks has `inline`, or a `url` "
                f"that is a file of JSON lines, and whose tasks have an `id` ({problem})"
            ) from error
        if not named:
            raise TrainingError(f"{manifest}: spec.tasks has no task to train on")
        return cls(spec, named)

    def supply(self, start: int = 0) -> Iterator[TaskRecord]:
        """Yield the tasks in turn, without end, from number `start` on. Each time a task has another id."""
        for index in count(start):
            task = self.tasks[index % len(self.tasks)]
            yield {**task, "id": f"{index:06d}-{task['id']}"}


def held_out_tasks(count: int | None = None) -> list[TaskRecord]:
    """Return the held-out tasks, or the first `count` of them; their templates come in turn.

    Raises:
        TrainingError: There are fewer than `count`.
    """
    tasks: list[TaskRecord] = [json.loads(line) for line in HELD_OUT.read_text().splitlines() if line.strip()]
    if count is not None and count > len(tasks):
        raise TrainingError(f"there are {len(tasks)} held-out tasks, {count} were asked for")
    return tasks[:count]
