"""A job as it usually is, at any size: rewards, failures, retries and stragglers in known numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from rollyard_api.machine.states import RolloutState
from rollyard_api.trajectories import attempts

from rollyard_testing.page.conversations import Conversations, Step
from rollyard_testing.page.store import Recorded, Result, Rollout, Store, plain_tasks, recorded

SAMPLES: Final = 8
SPAN: Final = 3600.0
"""The time in which the rollouts of a job end, in seconds."""
REASONS: Final = ("RunTimeout", "SandboxLost", "EvalTimeout", "BackendUnavailable")
WORDS: Final = ("maple", "willow", "lantern", "cherry", "bagel", "wagon", "dolphin", "basil", "galaxy")
"""A word of these is in the conversations of each group with the same number, modulo their count."""
VERSIONS: Final = tuple(f"step-{number}" for number in range(1, 9))
"""The labels of the weights that sampled the rollouts, one after the other."""
LONG_TOKENS: Final = 100_000
LONG_GROUP: Final = 3
"""The group whose first sample has a long trajectory, if the job has one."""


@dataclass(frozen=True, slots=True)
class Ordinary:
    """The expected numbers of a job that `ordinary_job` has made."""

    groups: int
    failed: int
    rewards: dict[float, int]
    """The number of rollouts with each reward."""

    @property
    def rollouts(self) -> int:
        """The number of rollouts."""
        return self.groups * SAMPLES


def _reward(rng: random.Random, group: int) -> float:
    """Return a reward of a group that is easy, hard or between, by its number."""
    chance = (1.0, 0.0, 0.5, 0.7)[group % 4]
    return 1.0 if rng.random() < chance else rng.choice((0.0, 0.25)) if group % 4 > 1 else 0.0


def _recorded(conversations: Conversations, word: str, version: str) -> tuple[Recorded, int]:
    steps = [
        Step(
            f"I look for {word} in the files.", f"grep -rc {word} data", f"data/a.txt:12\ndata/{word}.txt:3\n"
        ),
        Step(f"There are 15 lines with {word}."),
    ]
    made = conversations.trajectory(f"Count the lines with {word} below data.", steps, [version])
    made["metadata"] = {"eval": {"command": "test", "output": f"want 15, got 15 of {word}\n", "exit_code": 0}}
    return recorded(made), sum(made["segments"][0]["loss_mask"])


def _retried(rng: random.Random, now: float) -> bytes:
    one: dict[str, Any] = attempts.attempt(
        stage="run",
        number=1,
        reason=rng.choice(REASONS),
        message="the sandbox ended with signal 9",
        worker=f"worker-{rng.randrange(8)}",
        node=f"node-{rng.randrange(4)}",
        started=now - 30.0,
        seconds=12.0,
        counted=True,
    )
    return attempts.added(None, one)


async def ordinary_job(
    store: Store,
    name: str,
    groups: int,
    now: float,
    *,
    pool: str | None = None,
    ended: float = 1.0,
    long: bool = False,
    seed: int = 0,
    span: float = SPAN,
) -> Ordinary:
    """Add a job of so many groups of SAMPLES rollouts, and return what is to be seen of it.

    Args:
        store: The store.
        name: The name of the job.
        groups: The number of groups.
        now: When the last rollout ends, in seconds since the epoch.
        pool: The pool that the job names.
        ended: The part of the groups whose rollouts have ended, from 0 to 1. Others stay queued.
        long: Whether the first sample of the group LONG_GROUP has LONG_TOKENS tokens.
        seed: The seed of what differs.
        span: The time in which the rollouts end, in seconds.
    """
    rng = random.Random(seed)
    conversations = Conversations(seed=seed)
    recordings = {
        (word, version): _recorded(conversations, word, version) for word in WORDS for version in VERSIONS
    }
    order: list[Rollout] = [(no, sample) for no in range(round(groups * ended)) for sample in range(SAMPLES)]
    # Neighbours end about together, but a group does not end as a whole.
    order.sort(key=lambda rollout: rollout[0] + rng.uniform(0.0, 12.0))
    place = {rollout: number for number, rollout in enumerate(order)}
    rewards: dict[float, int] = {}
    failed = 0

    def result(no: int, sample: int) -> Result:
        nonlocal failed
        share = place[no, sample] / max(1, len(order))
        index = min(len(VERSIONS) - 1, int(share * len(VERSIONS)))
        blob, tokens = recordings[WORDS[no % len(WORDS)], VERSIONS[index]]
        # Ends come in batches of a second or so, as those of workers do.
        at = round(now - span + span * share, 0 if groups > 1000 else 1)
        run = rng.lognormvariate(0.7, 0.5) * (12.0 if rng.random() < 0.01 else 1.0)
        fails = rng.random() < 0.03
        if long and (no, sample) == (LONG_GROUP, 0):
            made = conversations.of_length(LONG_TOKENS)
            blob, tokens, fails = recorded(made), sum(made["segments"][0]["loss_mask"]), False
        reward = None if fails else _reward(rng, no)
        failed += fails
        if reward is not None:
            rewards[reward] = rewards.get(reward, 0) + 1
        return Result(
            state=RolloutState.FAILED if fails else RolloutState.SUCCEEDED,
            reward=reward,
            ended_at=at,
            seconds=(round(rng.uniform(0.05, 0.3), 3), round(run, 3), round(rng.uniform(0.05, 0.4), 3)),
            queued=(
                round(rng.uniform(0, 2), 3),
                round(rng.uniform(0, 0.5), 3),
                round(rng.uniform(0, 0.2), 3),
            ),
            model=round(run * 0.7, 3),
            tools=round(run * 0.2, 3),
            recorded=blob,
            tokens=tokens,
            policy_index=index + 1,
            worker=f"worker-{rng.randrange(8)}",
            node=f"node-{rng.randrange(4)}",
            components={} if fails else {"answer": float(reward or 0.0), "format": 1.0},
            stage="run" if fails else "eval",
            reason=REASONS[(no + sample) % len(REASONS)] if fails else None,
            message=f"the rollout was given up after 3 attempts at {sample}" if fails else None,
            attempts=_retried(rng, at) if fails or rng.random() < 0.02 else None,
        )

    await store.job(name, plain_tasks(groups), SAMPLES, result, order, began=now - span - 10.0, pool=pool)
    return Ordinary(groups, failed, rewards)
