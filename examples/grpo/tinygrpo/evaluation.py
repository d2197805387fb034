"""Success on the held-out tasks, measured by a job of its own on the same pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rollyard import Client

from tinygrpo.errors import PolicyMismatch, RolloutsEnded
from tinygrpo.rollouts import StreamSettings, episode, sampling
from tinygrpo.tasks import TaskRecord
from tinygrpo.versions import sampled

EVALUATION_SEED: Final = 1_000_003
"""The seed of sampling in every evaluation, so that two policies meet the same chances."""
_EVALUATION_SECONDS: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation: `success` is the mean reward of `rollouts` rollouts at temperature 1."""

    success: float
    rollouts: int
    per_family: dict[str, float]


def evaluate(
    client: Client,
    job: str,
    pool: str,
    version: str,
    tasks: Sequence[TaskRecord],
    samples: int,
    stream: StreamSettings,
) -> Evaluation:
    """Play `samples` rollouts of each task and return how many succeed.

    Args:
        client: A client of the control plane.
        job: The name of the job. An evaluation that has ended is read again instead of run again.
        pool: The pool that samples.
        version: The policy version that every token must carry.
        tasks: The held-out tasks.
        samples: The rollouts of each task.
        stream: What may be in flight, as in training.

    Raises:
        PolicyMismatch: Other weights sampled a token.
        RolloutsEnded: A rollout has no reward.
    """
    spec = {
        **episode(stream),
        "tasks": {"inline": list(tasks)},
        "samplesPerTask": samples,
        "sampling": sampling(EVALUATION_SEED),
        "backendRef": {"name": pool},
    }
    metadata = {"name": job, "namespace": client.namespace}
    client.submit(
        {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": metadata, "spec": spec}
    )
    client.wait(job, timeout=_EVALUATION_SECONDS)
    families = {str(task["id"]): str(task["metadata"]["family"]) for task in tasks}
    rewards: dict[str, list[float]] = {}
    for trajectory in client.trajectories(job):
        if trajectory.reward is None:
            raise RolloutsEnded(
                f"{job}: {trajectory.id} has no reward: {trajectory.reason} {trajectory.message}"
            )
        for segment in trajectory.segments:
            others = set(sampled(segment.policy_versions, segment.loss_mask)) - {version}
            if others:
                raise PolicyMismatch(f"{job}: {trajectory.id} has tokens of {others}, expected {version!r}")
        rewards.setdefault(families[trajectory.task_id], []).append(trajectory.reward)
    every = [reward for family in rewards.values() for reward in family]
    if len(every) != len(tasks) * samples:
        raise RolloutsEnded(f"{job}: {len(every)} rollouts have ended, expected {len(tasks) * samples}")
    return Evaluation(
        sum(every) / len(every),
        len(every),
        {family: sum(values) / len(values) for family, values in sorted(rewards.items())},
    )
