"""The rollouts of a training run: one stream of tasks in Rollyard, which delivers groups step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rollyard import Client, Group, ResultIterator
from rollyard.errors import Conflict, JobFailed, NotFound

from tinygrpo.errors import CheckpointLost, RolloutsEnded, RunTaken
from tinygrpo.ledger import Use, UsedGroup
from tinygrpo.tasks import OwnJob, TaskRecord, training_tasks
from tinygrpo.versions import PolicyVersions

_PUSH: Final = 32
"""The number of tasks that are pushed at once."""
_DEADLINE_SECONDS: Final = 7200
"""The longest run. It bounds every wait for a group: a job past it ends, and so does the wait."""
CONSUMER: Final = "trainer"
"""The name under which the control plane keeps the cursor of the groups that a checkpoint has used."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The size of a step, and what may be in flight. Groups of `samples` rollouts are counted."""

    groups: int = 32
    """The groups with a signal that a step trains on."""
    samples: int = 8
    in_flight: int = 12
    """The groups that are tried at once: enough to keep the Run stage busy, because the rest is wasted."""
    max_lag: int = 0
    """By how many updates the oldest token of a group may be behind the newest weights."""
    concurrency: int = 32
    """The rollouts that are in the Run stage at once."""
    warm: int = 8
    """The sandboxes that stand ready."""


def episode(settings: StreamSettings) -> dict[str, Any]:
    """Return the part of a job's spec that says how a rollout runs; training and evaluation share it."""
    return {
        "handler": "shell",
        "agent": {
            "type": "tools",
            "tools": ["bash", "edit", "submit"],
            "maxTurns": 8,
            "maxContextTokens": 1024,
        },
        "sandbox": {
            "network": "none",
            "resources": {"cpu": "1", "memory": "256Mi", "disk": "64Mi", "processes": 64},
            "warm": settings.warm,
        },
        "stages": {
            "init": {"concurrency": 8, "timeoutSeconds": 60},
            "run": {"concurrency": settings.concurrency, "timeoutSeconds": 120},
            "eval": {"concurrency": 8, "timeoutSeconds": 60},
        },
        "activeDeadlineSeconds": _DEADLINE_SECONDS,
    }


def target_of(step: int) -> str:
    """Return the id of a step's target. A target that is opened again under its id changes nothing."""
    return f"step-{step}"


def sampling(seed: int, most_tokens: int = 64) -> dict[str, Any]:
    """Return parameters of sampling under which the recorded log-probabilities are the policy's own."""
    return {"temperature": 1.0, "topP": 1.0, "maxTokens": most_tokens, "seed": seed}


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """How far a run has used its stream. A checkpoint keeps it, and a resumed run continues there."""

    cursor: str = ""
    """The cursor behind the last group that was used; empty before the first one."""
    groups: int = 0
    """The groups that were read up to there."""
    tasks: int = 0
    """The tasks that had been pushed at that time. A later one is pushed again under the same id, which
    changes nothing."""


@dataclass(slots=True)
class StepGroups:
    """What one step has read: the groups to train on, and all that were read to find them."""

    trained: list[Group] = field(default_factory=list)
    used: list[UsedGroup] = field(default_factory=list)
    """A line of the ledger for each group that was read, in their order."""
    rollouts: int = 0
    """The rollouts of all groups that were read."""
    rewards: list[float] = field(default_factory=list)
    """The rewards of all of them that are fresh enough, with those of groups without a signal."""
    uninformative: int = 0
    stale: int = 0
    """The groups that were read and thrown away because a token was too old."""
    failed: int = 0
    """The rollouts that have no reward, for reasons of the infrastructure."""


class RolloutStream:
    """The stream of one run. Targets may be opened ahead of training; that is what makes it asynchronous.

    Args:
        client: A client of the control plane.
        job: The name of the job.
        pool: The pool that samples.
        seed: The seed of tasks and of sampling.
        settings: The size of a step.
        versions: The labels of the run.
        own: The job whose tasks are trained on, or None for tasks from the templates of the tiny policy.
    """

    def __init__(
        self,
        client: Client,
        job: str,
        pool: str,
        seed: int,
        settings: StreamSettings,
        versions: PolicyVersions,
        own: OwnJob | None = None,
    ) -> None:
        self._client = client
        self._job = job
        self._pool = pool
        self._seed = seed
        self._settings = settings
        self._versions = versions
        self._own = own
        self._place = StreamPlace()
        self._tasks: Iterator[TaskRecord] = iter(())
        self._groups: ResultIterator[Group] | None = None
        self._acknowledged = ""

    @property
    def place(self) -> StreamPlace:
        """The place behind the last group that was read."""
        return self._place

    def submit(self, place: StreamPlace | None = None) -> None:
        """Submit the job, or find it again, and begin to read at the place of a checkpoint.

        Raises:
            RolloutsEnded: The job of the checkpoint does not exist any more.
            CheckpointLost: The run has used groups of which the checkpoint knows nothing.
        """
        place = place or StreamPlace()
        if place.cursor:
            self._find_job()
        self._client.submit(self._manifest())
        self._resume(place.cursor)
        self._place = place
        if self._own is None:
            self._tasks = training_tasks(self._seed, place.tasks)
        else:
            self._tasks = self._own.supply(place.tasks)
        self._push()
        self._groups = self._client.groups(self._job, follow=True, dropped=True, cursor=place.cursor)

    def acknowledge(self) -> None:
        """Let the control plane keep the place, once a checkpoint has it on the disk.

        Raises:
            RunTaken: Another trainer has moved the cursor of this run.
        """
        try:
            self._client.acknowledge(self._job, CONSUMER, self._place.cursor, expected=self._acknowledged)
        except Conflict as error:
            if error.reason in ("CursorMoved", "CursorBehind"):
                raise RunTaken(f"another trainer works on the run {self._job}: {error}") from error
            raise
        self._acknowledged = self._place.cursor

    def open(self, step: str, groups: int | None = None) -> None:
        """Let the control plane look for the groups of a step. A repeat has no further effect."""
        self._client.open_target(self._job, step, groups=groups or self._settings.groups)

    def collect(self, step: int, newest: int) -> StepGroups:
        """Read groups until a step has all that it trains on; targets must have been opened.

        Args:
            step: The number of the step. Groups that are too old are replaced by further targets, which are
                named after it.
            newest: The number of updates that the pool has had.

        Raises:
            RolloutsEnded: The job ended before.
            PolicyMismatch: A token carries a version that this run did not push.
        """
        found = StepGroups()
        while len(found.trained) < self._settings.groups:
            group = self._next()
            found.rollouts += len(group.trajectories)
            found.failed += sum(one.reward is None for one in group.trajectories)
            use = self._use_of(group, newest)
            found.used.append(UsedGroup.of(step, use, group))
            if use == "stale":
                found.stale += 1
                if group.informative:
                    # The control plane has counted this group; one more is wanted in its place.
                    self.open(f"{target_of(step)}-for-{group.group_id}", 1)
            elif use != "dropped":
                found.rewards += [one.reward for one in group.trajectories if one.reward is not None]
                found.uninformative += use == "uninformative"
                if use == "trained":
                    found.trained.append(group)
        return found

    def close(self) -> None:
        """End the stream. What is left of it is cancelled by the control plane. A repeat changes nothing."""
        with suppress(NotFound):
            self._client.cancel(self._job)

    def _find_job(self) -> None:
        try:
            self._client.job(self._job)
        except NotFound as error:
            raise RolloutsEnded(
                f"the checkpoint continues the job {self._job}, which was removed with its rollouts; begin a "
                "new run with another --run and --out"
            ) from error

    def _resume(self, cursor: str) -> None:
        """Find that the control plane has the cursor of the checkpoint, or an earlier one.

        A trainer that was killed behind its checkpoint has not acknowledged it yet. A later cursor than the
        checkpoint's has no such explanation.
        """
        kept = [one.cursor for one in self._client.acknowledged(self._job) if one.consumer == CONSUMER]
        try:
            if cursor:
                self._client.acknowledge(self._job, CONSUMER, cursor)
        except Conflict as error:
            if error.reason != "CursorBehind":
                raise
        else:
            if cursor or not kept:
                self._acknowledged = cursor
                return
        raise CheckpointLost(
            f"the run {self._job} has used the groups up to the cursor {kept[0]}, but its newest checkpoint "
            f"ends at {cursor or 'the beginning'}; bring the lost checkpoint back, or begin a new run with "
            "another --run and --out, because rollouts would be used twice"
        )

    def _use_of(self, group: Group, newest: int) -> Use:
        if not group.delivered:
            return "dropped"
        if self._versions.lag(group, newest) > self._settings.max_lag:
            return "stale"
        return "trained" if group.informative else "uninformative"

    def _next(self) -> Group:
        if self._groups is None:
            raise RolloutsEnded("the stream has not been submitted")
        try:
            group = next(self._groups, None)
        except JobFailed as error:
            raise RolloutsEnded(str(error)) from error
        if group is None:
            raise RolloutsEnded(f"the job {self._job} has ended, and has no further group")
        place = self._place
        self._place = replace(place, cursor=self._groups.cursor, groups=place.groups + 1)
        self._push()
        return group

    def _push(self) -> None:
        """Push tasks so that neither this step nor the next one has to wait for them."""
        ahead = self._settings.in_flight + (2 + self._settings.max_lag) * self._settings.groups
        while self._place.tasks - self._place.groups < ahead:
            self._client.push_tasks(self._job, [next(self._tasks) for _ in range(_PUSH)])
            self._place = replace(self._place, tasks=self._place.tasks + _PUSH)

    def _manifest(self) -> dict[str, Any]:
        settings = self._settings
        own = {} if self._own is None else self._own.spec
        most_tokens = own.get("sampling", {}).get("maxTokens", 64)
        return {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": self._job, "namespace": self._client.namespace},
            "spec": {
                **episode(settings),
                **own,
                "tasks": {"stream": True},
                "samplesPerTask": settings.samples,
                "sampling": sampling(self._seed, most_tokens),
                "backendRef": {"name": self._pool},
                "dynamicSampling": {"targetGroups": settings.groups, "maxInFlightGroups": settings.in_flight},
                "maxPolicyLag": settings.max_lag,
                "staleRollouts": "Restart",
            },
        }
