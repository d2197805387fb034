"""Sequences of token ids to train on, one for each segment in which the policy sampled something.

All adapters begin here, so that they agree on what is trained on, and with which reward.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rollyard_crds.trajectory import Segment, Trajectory

from rollyard.integrations.errors import TrainerMismatch

Group = tuple[str, str, str]
_STEP: Final = re.compile(r"(\d+)$")


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence of a rollout, which a trainer pads, batches and computes a loss on."""

    trajectory: Trajectory
    segment: Segment
    index: int
    """The segment's index in `trajectory.segments`, or -1 for a placeholder."""
    trained: bool
    """Whether the trainer may learn from it. False if no evaluation gave the rollout a reward."""
    reward: float
    """The rollout's reward. If it has none, this is the mean reward of its group; see `rewards`."""
    last: bool
    """Whether it is the rollout's last sequence."""

    @property
    def loss_mask(self) -> list[int]:
        """The mask of the response: 1 on sampled tokens to learn from. It is as long as `response_ids`."""
        return list(self.segment.loss_mask) if self.trained else [0] * len(self.segment.loss_mask)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the prompt and the response."""
        return [*self.segment.prompt_ids, *self.segment.response_ids]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The stretches of sampled tokens, as begin and end in the response."""
        spans, at = [], 0
        for sampled, run in groupby(self.segment.loss_mask):
            length = sum(1 for _ in run)
            if sampled:
                spans.append((at, at + length))
            at += length
        return spans

    @property
    def why(self) -> str:
        """The reason of the rollout's failure, of its missing reward or of its truncation, or ""."""
        trajectory = self.trajectory
        return trajectory.reason or trajectory.reward_reason or trajectory.truncated_reason

    @property
    def versions(self) -> list[str]:
        """The policy versions that sampled its tokens, each once, in the order of their first token."""
        return versions(self.segment)


def versions(*segments: Segment) -> list[str]:
    """Return the policy versions that sampled tokens of the segments, each once, as they appear."""
    unique: dict[str, None] = {}
    for segment in segments:
        pairs = zip(segment.policy_versions, segment.loss_mask, strict=True)
        unique.update((version, None) for version, mask in pairs if mask)
    return list(unique)


def step_of(version: str) -> int | None:
    """Return the number at the end of a policy version such as `step-120`, or None if it has none."""
    match = _STEP.search(version)
    return None if match is None else int(match[1])


def is_scored(trajectory: Trajectory) -> bool:
    """Return whether an evaluation gave the rollout a reward. Without one, nothing can be learnt from it."""
    return trajectory.status == "succeeded" and trajectory.reward is not None


def group_of(trajectory: Trajectory) -> Group:
    """Return the rollout's group: its namespace, its job and the id of the group."""
    return (trajectory.namespace, trajectory.job, trajectory.group_id)


def rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return a number for each rollout, for trainers that cannot take a missing reward.

    A failed or cancelled rollout gets the mean reward of the scored ones of its group, so that it does not
    move the baseline of the others, and 0.0 if there is none. It is never trained on. (The standard deviation
    of the group becomes smaller: with f of n members filled in, by the factor sqrt((n - f) / n).)
    """
    means = mean_rewards(trajectories)
    return [
        trajectory.reward
        if trajectory.reward is not None and is_scored(trajectory)
        else means.get(group_of(trajectory), 0.0)
        for trajectory in trajectories
    ]


def mean_rewards(trajectories: Iterable[Trajectory]) -> dict[Group, float]:
    """Return the mean reward of the scored rollouts of each group that has any."""
    scored: defaultdict[Group, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is not None and is_scored(trajectory):
            scored[group_of(trajectory)].append(trajectory.reward)
    return {group: sum(rewards) / len(rewards) for group, rewards in scored.items()}


def sequences(
    trajectories: Iterable[Trajectory], *, pad_token_id: int | None = None
) -> list[TrainingSequence]:
    """Return the sequences of rollouts, in the order of the rollouts and of their segments.

    A segment in which nothing was sampled is left out, because nothing in it can be trained on.

    Args:
        trajectories: The rollouts, whole groups of them.
        pad_token_id: If it is given, a rollout without any sampled token still has one sequence, for trainers
            that need a row for each rollout. That placeholder has the prompt of another member of the group,
            or only this token, and this token as its response, with mask 0.
    """
    every = list(trajectories)
    prompts: dict[Group, list[int]] = {}
    for trajectory in every:
        if trajectory.segments and trajectory.segments[0].prompt_ids:
            prompts.setdefault(group_of(trajectory), trajectory.segments[0].prompt_ids)
    rows = []
    for trajectory, reward in zip(every, rewards(every), strict=True):
        indexes = [index for index, segment in enumerate(trajectory.segments) if any(segment.loss_mask)]
        scored = is_scored(trajectory)
        for index in indexes:
            last = index == indexes[-1]
            rows.append(TrainingSequence(trajectory, trajectory.segments[index], index, scored, reward, last))
        if not indexes and pad_token_id is not None:
            prompt = prompts.get(group_of(trajectory), [pad_token_id])
            segment = Segment(
                prompt_ids=list(prompt),
                response_ids=[pad_token_id],
                loss_mask=[0],
                logprobs=[0.0],
                policy_versions=[""],
            )
            rows.append(TrainingSequence(trajectory, segment, -1, False, reward, True))
    return rows


def check_one_each(rows: Iterable[TrainingSequence], text: str) -> None:
    """Check that each rollout has one sequence.

    Args:
        rows: What `sequences` returned.
        text: The rest of the sentence that begins with "rollout NAME has several segments".

    Raises:
        TrainerMismatch: A rollout has several (`SegmentsRefused`).
    """
    for row in rows:
        if not row.last:
            raise TrainerMismatch(
                f"rollout {row.trajectory.id} has several segments{text}", reason="SegmentsRefused"
            )
