"""The rollouts of a training run: one stream of tasks in Rollyard, which delivers groups step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rollyard_client import Client
from rollyard_client.requests.results import Group

from tinygrpo.errors import RolloutsEnded
from tinygrpo.tasks import TaskRecord, training_tasks
from tinygrpo.versions import PolicyVersions

_PUSH: Final = 32
"""The number of tasks that are pushed at once."""
_DEADLINE_SECONDS: Final = 7200
"""The longest run. It bounds every wait for a group: a job past it ends, and so does the wait."""


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


def episode(concurrency: int) -> dict[str, Any]:
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
            "warm": 8,
        },
        "stages": {
            "init": {"concurrency": 8, "timeoutSeconds": 60},
            "run": {"concurrency": concurrency, "timeoutSeconds": 120},
            "eval": {"concurrency": 8, "timeoutSeconds": 60},
        },
        "activeDeadlineSeconds": _DEADLINE_SECONDS,
    }


def sampling(seed: int) -> dict[str, Any]:
    """Return parameters of sampling under which the recorded log-probabilities are the policy's own."""
    return {"temperature": 1.0, "topP": 1.0, "maxTokens": 64, "seed": seed}


@dataclass(slots=True)
class StepGroups:
    """What one step has read: the groups to train on, and all that were read to find them."""

    trained: list[Group] = field(default_factory=list)
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
    """

    def __init__(
        self,
        client: Client,
        job: str,
        pool: str,
        seed: int,
        settings: StreamSettings,
        versions: PolicyVersions,
    ) -> None:
        self._client = client
        self._job = job
        self._pool = pool
        self._seed = seed
        self._settings = settings
        self._versions = versions
        self._tasks: Iterator[TaskRecord] = training_tasks(seed)
        self._groups: Iterator[Group] = iter(())
        self._pushed = 0
        self.read = 0
        """The number of groups that were read, which is where a resumed run continues."""

    def submit(self, read: int = 0) -> None:
        """Submit the job, or find it again, and begin to read behind the first `read` groups."""
        self._client.submit(self._manifest())
        self._tasks = training_tasks(self._seed)
        self._pushed = 0
        self.read = 0
        self._push()
        self._groups = self._client.groups(self._job, follow=True, dropped=True)
        while self.read < read:
            self._next()

    def open(self, step: str, groups: int | None = None) -> None:
        """Let the control plane look for the groups of a step. A repeat has no further effect."""
        self._client.open_target(self._job, step, groups=groups or self._settings.groups)

    def collect(self, step: str, newest: int) -> StepGroups:
        """Read groups until a step has all that it trains on; targets must have been opened.

        Args:
            step: The id of the step. Groups that are too old are replaced by further targets, which are named
                after it.
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
            if not group.delivered:
                continue
            if self._versions.lag(group, newest) > self._settings.max_lag:
                found.stale += 1
                if group.informative:
                    # The control plane has counted this group; one more is wanted in its place.
                    self.open(f"{step}-for-{group.group_id}", 1)
                continue
            found.rewards += [one.reward for one in group.trajectories if one.reward is not None]
            if group.informative:
                found.trained.append(group)
            else:
                found.uninformative += 1
        return found

    def close(self) -> None:
        """End the stream. What is left of it is cancelled by the control plane."""
        self._client.cancel(self._job)

    def _next(self) -> Group:
        group = next(self._groups, None)
        if group is None:
            status = self._client.job(self._job).status
            said = next((one.message for one in status.conditions if one.type == "Finished"), "")
            raise RolloutsEnded(f"the job {self._job} has ended ({status.phase}): {said}")
        self.read += 1
        self._push()
        return group

    def _push(self) -> None:
        """Push tasks so that neither this step nor the next one has to wait for them."""
        ahead = self._settings.in_flight + (2 + self._settings.max_lag) * self._settings.groups
        while self._pushed - self.read < ahead:
            self._client.push_tasks(self._job, [next(self._tasks) for _ in range(_PUSH)])
            self._pushed += _PUSH

    def _manifest(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": self._job},
            "spec": {
                **episode(settings.concurrency),
                "tasks": {"stream": True},
                "samplesPerTask": settings.samples,
                "sampling": sampling(self._seed),
                "backendRef": {"name": self._pool},
                "dynamicSampling": {"targetGroups": settings.groups, "maxInFlightGroups": settings.in_flight},
                "maxPolicyLag": settings.max_lag,
                "staleRollouts": "Restart",
            },
        }
