"""What the latencies alone allow: lower bounds on makespans.

This is pure arithmetic, in seconds. The bounds hold for every schedule, so no order of rollouts can beat
them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slots:
    """The number of rollouts that each stage holds at once."""

    init: int
    run: int
    eval: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A number of rollouts with fixed latencies; every `slow_every`th evaluates for `eval_slow` seconds."""

    rollouts: int
    init: float
    model_call: float
    turns: int
    """The number of model calls in one rollout's Run."""
    eval: float
    eval_slow: float
    slow_every: int

    @property
    def run(self) -> float:
        """Return the seconds of model time in one Run."""
        return self.model_call * self.turns

    @property
    def slow(self) -> int:
        """Return the number of rollouts that evaluate slowly: numbers 0, `slow_every`, 2 `slow_every`, …"""
        return -(-self.rollouts // self.slow_every)

    @property
    def eval_total(self) -> float:
        """Return the seconds of evaluation of all rollouts together."""
        return self.slow * self.eval_slow + (self.rollouts - self.slow) * self.eval

    def eval_of(self, number: int) -> float:
        """Return the seconds that the evaluation of this sample of its group takes."""
        return self.eval_slow if number % self.slow_every == 0 else self.eval


def stage_bounds(work: Workload, slots: Slots) -> dict[str, float]:
    """Return the bound of each stage: fill + total work / slots + drain.

    Fill is the least time that any rollout needs before the stage, and drain the least time after it: no slot
    of the stage can begin earlier, and the rollout that leaves it last still has to pass the rest.
    """
    shortest_eval = min(work.eval, work.eval_slow) if work.slow < work.rollouts else work.eval_slow
    return {
        "init": work.rollouts * work.init / slots.init + work.run + shortest_eval,
        "run": work.init + work.rollouts * work.run / slots.run + shortest_eval,
        "eval": work.init + work.run + work.eval_total / slots.eval,
    }


def pipeline_bound(work: Workload, slots: Slots) -> float:
    """Return the largest of the stages' bounds: no pipeline of these slots ends sooner."""
    return max(stage_bounds(work, slots).values())
