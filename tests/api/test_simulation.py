"""Invariants 1, 2 and 3 are checked with a ledger outside the control plane.

Seeded random workers lease, complete, fail, hand over, die, repeat old calls; jobs and rollouts
are cancelled; the control plane is closed and opened again. Whatever happens: every rollout
ends exactly once, tokens only grow, at most one completion per token is accepted, and only an
evaluation gives a reward.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from rollyard_api.rollouts import sweeps
from rollyard_testing.api.plane import Worker, serving

ROLLOUTS = 24
STEPS = 90


@dataclass
class Ledger:
    """What the outside world was answered, per rollout."""

    granted: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    accepted: dict[tuple[str, int], str] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    final_failures: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)

    def lease(self, lease: dict[str, Any]) -> None:
        tokens = self.granted[lease["rollout"]]
        assert not tokens or lease["token"] == tokens[-1] + 1, "a token was reused or skipped"
        assert lease["rollout"] not in self.rewards, "an ended rollout was leased"
        assert lease["rollout"] not in self.cancelled, "a cancelled rollout was leased"
        tokens.append(lease["token"])

    def outcome(self, lease: dict[str, Any], said: str, outcome: str, reward: float | None = None) -> None:
        key = (lease["rollout"], lease["token"])
        if outcome == "accepted":
            assert key not in self.accepted, "one token, two accepted outcomes"
            assert lease["token"] == self.granted[lease["rollout"]][-1], "a fenced-off holder was believed"
            self.accepted[key] = said
            if said == "complete" and lease["stage"] == "eval":
                assert lease["rollout"] not in self.rewards
                assert reward is not None
                self.rewards[lease["rollout"]] = reward
        elif outcome == "repeated":
            assert self.accepted.get(key) == said, "called a repeat what was never accepted"


class Simulation:
    """One seeded run."""

    def __init__(self, seed: int, served: Any) -> None:
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.workers = [Worker(served.worker, f"w{i}", f"n{i % 2}") for i in range(3)]
        self.held: list[tuple[Any, dict[str, Any]]] = []
        self.past: list[tuple[Any, dict[str, Any]]] = []
        self.served = served

    def connect(self, served: Any) -> None:
        self.served = served
        for worker in self.workers:
            worker.http = served.worker

    async def step(self) -> None:
        actions = [self.lease] * 6 + [self.complete] * 8 + [self.fail] * 2
        await self.rng.choice(
            [*actions, self.expire, self.forget, self.repeat, self.repeat, self.beat, self.cancel]
        )()

    async def lease(self) -> None:
        worker = self.rng.choice(self.workers)
        stages = self.rng.sample(["init", "run", "eval"], self.rng.randint(1, 3))
        for lease in await worker.lease(**{stage: self.rng.randint(1, 4) for stage in stages}):
            self.ledger.lease(lease)
            if lease["sandbox"] is not None:
                assert lease["sandbox"]["node"] == worker.node
            self.held.append((worker, lease))

    def take(self) -> tuple[Any, dict[str, Any]] | None:
        if not self.held:
            return None
        item = self.held.pop(self.rng.randrange(len(self.held)))
        self.past.append(item)
        return item

    async def complete(self) -> None:
        if (item := self.take()) is not None:
            await self.send_completion(*item)

    async def send_completion(self, worker: Any, lease: dict[str, Any]) -> None:
        reward = round(self.rng.random(), 3) if lease["stage"] == "eval" else None
        fields = {"reward": reward} if reward is not None else {}
        (outcome,) = await worker.complete(worker.result(lease, **fields))
        self.ledger.outcome(lease, "complete", outcome, reward)

    async def fail(self) -> None:
        if (item := self.take()) is not None:
            await self.send_failure(*item)

    async def send_failure(self, worker: Any, lease: dict[str, Any]) -> None:
        fields: dict[str, Any] = {"counts": self.rng.random() < 0.7, "retryable": self.rng.random() < 0.9}
        if self.rng.random() < 0.4:
            fields["return_to"] = "init"
        self.ledger.outcome(lease, "fail", await worker.fail(lease, **fields))

    async def repeat(self) -> None:
        """Repeat the call of a worker that was slow or whose answer was lost, with old tokens, too."""
        if self.past:
            worker, lease = self.rng.choice(self.past)
            await self.rng.choice([self.send_completion, self.send_failure])(worker, lease)

    async def forget(self) -> None:
        """Let a worker die: what it held is never completed, unless by a late repeat."""
        self.take()

    async def expire(self) -> None:
        await self.served.later(3600, sweeps.expire)

    async def beat(self) -> None:
        if self.held:
            worker, lease = self.rng.choice(self.held)
            told = await worker.heartbeat(lease)
            newest = self.ledger.granted[lease["rollout"]][-1] == lease["token"]
            assert newest or told["lost"], "a fenced-off lease was renewed"

    async def cancel(self) -> None:
        known = [rollout for rollout in self.ledger.granted if rollout not in self.ledger.rewards]
        if known and self.rng.random() < 0.3:
            rollout = self.rng.choice(known)
            await self.served.admin.post("/v1/rolloutjobs/job/cancel", json={"rollout": rollout})
            one = (await self.served.admin.get(f"/v1/rolloutjobs/job/rollouts/{rollout}")).json()
            if one["status"] == "cancelled":
                self.ledger.cancelled.add(rollout)

    async def finish(self) -> None:
        """Take what is left to its end by workers that do not fail, one per node."""
        await self.expire()
        self.held.clear()
        for _ in range(20):
            progress = 0
            for worker in self.workers[:2]:
                for lease in await worker.lease(init=32, run=32, eval=32):
                    progress += 1
                    self.ledger.lease(lease)
                    await self.send_completion(worker, lease)
            if not progress:
                return
        raise AssertionError("rollouts go round in circles")


async def _audit(served: Any, ledger: Ledger) -> None:
    answer = await served.admin.get("/v1/rolloutjobs/job/trajectories", params={"limit": 1000})
    assert answer.headers["rollyard-finished"] == "true"
    import orjson

    records = [orjson.loads(line) for line in answer.content.splitlines()]
    ids = [record["id"] for record in records]
    assert len(ids) == len(set(ids)) == ROLLOUTS, "lost or doubled"
    assert {r["id"]: r["reward"] for r in records if r["reward"] is not None} == ledger.rewards
    for record in records:
        assert (record["reward"] is not None) == (record["status"] == "succeeded")
        assert record["status"] != "failed" or record["reason"]
    assert ledger.cancelled == {r["id"] for r in records if r["status"] == "cancelled"}
    counts = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]["counts"]
    assert counts["succeeded"] == len(ledger.rewards)
    assert counts["succeeded"] + counts["failed"] + counts["cancelled"] == counts["total"] == ROLLOUTS


@pytest.mark.parametrize("seed", range(4))
async def test_exactly_one_result(seed: int, settings: Any) -> None:
    tasks = [{"id": f"t{i}", "prompt": "p"} for i in range(ROLLOUTS // 4)]
    rounds = 3
    simulation: Simulation | None = None
    for _ in range(rounds):
        async with serving(settings) as served:
            if simulation is None:
                await served.submit(tasks={"inline": tasks}, samplesPerTask=4)
                simulation = Simulation(seed, served)
            simulation.connect(served)
            for _ in range(STEPS // rounds):
                await simulation.step()
    assert simulation is not None
    async with serving(settings) as served:
        simulation.connect(served)
        await simulation.finish()
        await _audit(served, simulation.ledger)
