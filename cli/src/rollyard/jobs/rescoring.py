"""The re-evaluation of stored trajectories on this machine, a few at a time."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError
from rollyard_crds.fields.reward import RewardSpec
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.yaml_text import YamlError, load_one

from rollyard.errors import InvalidInput, LookupFailed
from rollyard.jobs.evaluation import count_bounded, open_rescorer, same_reward, shown_reward
from rollyard.jobs.manifests import extensions_with
from rollyard.trajectories.export import write_lines

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import RescoredTrajectory, Trajectory
    from rollyard_pipeline.stages.rescoring import Rescorer

CHUNK: Final = 64
"""The number of trajectories that are in memory at the same time."""
TASKS: Final = 32
"""The number of tasks that one request reads."""
MAX_REWARD_FILE: Final = 1 << 20
MAX_CHANGES: Final = 20
"""The largest number of different changes that a report counts one by one."""
OTHER_CHANGES: Final = "other changes"
MAX_REASONS: Final = 10
"""The largest number of different reasons for failures that a report counts one by one."""
OTHER_REASONS: Final = "other reasons"
MAX_TYPE: Final = 64
"""The largest number of characters shown of the type of an exception."""
MAX_EXAMPLE: Final = 300
"""The largest number of characters shown of a message."""


@dataclass(slots=True)
class RewardChanges:
    """What an evaluation changed, as numbers of trajectories."""

    changes: Counter[str] = field(default_factory=Counter)
    """The rewards that changed, by their old and new values."""
    same: int = 0
    """Trajectories whose reward is the same."""
    failed: int = 0
    """Trajectories that could not be evaluated, so that they have no reward now."""
    reasons: Counter[str] = field(default_factory=Counter)
    """The same, by the exception that was raised."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first message of each reason."""
    unrewarded: int = 0
    """Trajectories of rollouts that failed or were cancelled, which stay as they are."""

    def add(self, before: Trajectory, now: Trajectory) -> None:
        """Count a trajectory."""
        if before.status != "succeeded":
            self.unrewarded += 1
        elif now.status != before.status:
            self.failed += 1
            self._add_reason(now)
        elif same_reward(before.reward, now.reward):
            self.same += 1
        else:
            change = f"{shown_reward(before.reward)} → {shown_reward(now.reward)}"
            count_bounded(self.changes, change, MAX_CHANGES, OTHER_CHANGES)

    def _add_reason(self, now: Trajectory) -> None:
        raised, _, message = now.message.partition(": ")
        reason = now.reason if raised == now.reason else f"{now.reason} ({raised[:MAX_TYPE]})"
        reason = count_bounded(self.reasons, reason, MAX_REASONS, OTHER_REASONS)
        self.examples.setdefault(reason, message[:MAX_EXAMPLE])

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: a sentence, the changes, and why evaluations failed.

        The most frequent changes and reasons come first.
        """
        changed = self.changes.total()
        total = changed + self.same + self.failed + self.unrewarded
        yield (
            f"Of {total} trajectories, {changed} rewards changed and {self.same} are the same; "
            f"{self.failed} could not be evaluated, and {self.unrewarded} had no reward."
        )
        yield from (f"  {change}: {count}" for change, count in self.changes.most_common())
        for reason, count in self.reasons.most_common():
            yield f"  not evaluated, {reason}: {count}, such as: {self.examples[reason]}"


def rescore(
    client: Client,
    name: str,
    namespace: str,
    handler: str,
    output: Path | None,
    reward_file: Path | None,
    sandbox: str,
    plugins: Sequence[Path] = (),
) -> RewardChanges:
    """Evaluate a job's trajectories again, and return how their rewards change.

    Args:
        client: The client of the control plane.
        name: The job.
        namespace: The namespace of the job.
        handler: The name of the handler.
        output: The file of JSON lines to write, as a whole or not at all. With None, none is written.
        reward_file: A file with a section `reward`. None stands for the job's own.
        sandbox: The kind of the sandboxes, for a handler that needs some.
        plugins: Files with further handlers and reward functions.

    Raises:
        LookupFailed: There is no such job or file, or the control plane has lost a task.
        InvalidInput: The handler judges what is not stored, the reward needs a service, a name is unknown, or
            no sandbox can be started here.
    """
    job = client.job(name, namespace)
    reward = job.spec.reward if reward_file is None else read_reward(reward_file)
    report = RewardChanges()
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    extensions = extensions_with(plugins)
    opened = open_rescorer("rescore", handler, job.spec, reward, by, sandbox, extensions)
    with opened as (rescorer, runner):

        def lines() -> Iterator[bytes]:
            for before, now in _rescored(client, name, namespace, rescorer, runner):
                report.add(before, now)
                yield now.line()

        if output is None:
            deque(lines(), maxlen=0)
        else:
            write_lines(lines(), output)
    return report


def _rescored(
    client: Client, name: str, namespace: str, rescorer: Rescorer, runner: asyncio.Runner
) -> Iterator[tuple[Trajectory, RescoredTrajectory]]:
    """Yield each trajectory before and after, in the order of the control plane."""
    begun = datetime.now(UTC)
    tasks: dict[str, Task] = {}
    trajectories = client.trajectories(name, namespace=namespace)
    while chunk := list(itertools.islice(trajectories, CHUNK)):
        task_ids = list(dict.fromkeys(trajectory.task_id for trajectory in chunk))
        tasks = {task_id: tasks[task_id] for task_id in task_ids if task_id in tasks}
        tasks |= _tasks(client, name, namespace, [task_id for task_id in task_ids if task_id not in tasks])
        pairs = [(trajectory, tasks[trajectory.task_id]) for trajectory in chunk]
        yield from zip(chunk, runner.run(rescorer.rescored(pairs, begun)), strict=True)


def _tasks(client: Client, name: str, namespace: str, task_ids: list[str]) -> dict[str, Task]:
    """Return tasks by their ids.

    Raises:
        LookupFailed: The control plane does not have one of them.
    """
    tasks: dict[str, Task] = {}
    while missing := [task_id for task_id in task_ids if task_id not in tasks]:
        page = client.tasks(name, missing[:TASKS], namespace)
        if not page:
            raise LookupFailed(f"the control plane does not have the task {missing[0]!r} of {name!r}")
        tasks |= {task.id: task for task in page}
    return tasks


def read_reward(path: Path) -> RewardSpec:
    """Return the section `reward` that a YAML file holds, with or without the key `reward`.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: It is not such a section. The message names the field.
    """
    try:
        if path.stat().st_size > MAX_REWARD_FILE:
            raise InvalidInput(f"{path}: larger than {MAX_REWARD_FILE >> 20} MiB; is it a section `reward`?")
        document = load_one(path.read_bytes())
    except YamlError as error:
        raise InvalidInput(f"{path}: {error}") from error
    except OSError as error:
        raise LookupFailed(f"{path}: {error.strerror}") from error
    if isinstance(document, dict) and document.keys() == {"reward"}:
        document = document["reward"]
    try:
        return RewardSpec.model_validate({} if document is None else document)
    except ValidationError as error:
        raise InvalidInput(f"{path}: {describe(error, 'reward')[0]}") from error
