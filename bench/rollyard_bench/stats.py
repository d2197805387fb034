"""Timing loops in interleaved blocks, in which noise of the machine hits every contestant alike."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Step = Callable[[], float | None] | Callable[[], Awaitable[float | None]]
"""What is timed. A step that returns milliseconds has timed itself, without what it does before and after."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Something to time: one call of `step` is one sample."""

    step: Step
    samples: int
    """The number of all samples, which are spread evenly over the rounds."""
    warm_up: int = 3
    """The number of untimed calls before the first round."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The durations of one contestant, in milliseconds."""

    values: tuple[float, ...]

    @property
    def p50(self) -> float:
        """The median."""
        return median(self.values)

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return (
            quantiles(self.values, n=100, method="inclusive")[98] if len(self.values) > 1 else self.values[0]
        )

    def text(self) -> str:
        """Return text such as `p50 0.31 ms, p99 0.62 ms, 900 samples`."""
        return f"p50 {self.p50:.3g} ms, p99 {self.p99:.3g} ms, {len(self.values)} samples"


async def _once(step: Step) -> float:
    begin = time.perf_counter()
    took = step()
    if inspect.isawaitable(took):
        took = await took
    return (time.perf_counter() - begin) * 1e3 if took is None else took


async def interleave(contestants: Mapping[str, Contestant], rounds: int) -> dict[str, Sample]:
    """Time all contestants in turns: in every round each takes its part of its samples.

    The order rotates by one each time, so none always follows the same other one.
    """
    for contestant in contestants.values():
        for _ in range(contestant.warm_up):
            await _once(contestant.step)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(rounds):
        for name in order:
            contestant = contestants[name]
            share = contestant.samples * (number + 1) // rounds - contestant.samples * number // rounds
            for _ in range(share):
                taken[name].append(await _once(contestant.step))
        order = order[1:] + order[:1]
    return {name: Sample(tuple(values)) for name, values in taken.items()}


async def in_turns(ours: Step, theirs: Step, rounds: int) -> tuple[Sample, Sample]:
    """Time two steps once in each round, after one call of each that is not timed."""
    contestants = {name: Contestant(step, rounds, 1) for name, step in (("ours", ours), ("theirs", theirs))}
    samples = await interleave(contestants, rounds)
    return samples["ours"], samples["theirs"]


def pairs_median(values: Sequence[float], baselines: Sequence[float]) -> tuple[float, float]:
    """Return the pair whose ratio of value to baseline is the median; of two middle ones, the larger."""
    ordered = sorted(zip(values, baselines, strict=True), key=lambda pair: pair[0] / pair[1])
    return ordered[len(ordered) // 2]
