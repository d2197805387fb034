"""The statistics of a job, which grow by each rollout that ends and are kept, instead of counted when asked.

They are bounded: the newest policy versions, a fixed number of buckets of time that grow wider, and the most
frequent reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollyard_api.machine.states import BY_NUMBER, RolloutState
from rollyard_api.trajectories import traces

MAX_KEYS: Final = 512
FIRST_STEP: Final = 2.0**-10
BINS: Final = 20


class Sketch:
    """A histogram of any numbers in bounded room, which needs no range before it sees them.

    Numbers are counted by the nearest multiple of a step, a power of two. The step doubles whenever more than
    MAX_KEYS multiples are in use, and the counts are merged. Rewards are usually a few values from 0 to 1,
    which the first step separates. The minimum, the maximum, the sum, and the numbers of zeros and ones are
    exact.

    Args:
        kept: What `document` of an earlier sketch returned, or None for an empty one.
    """

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        given = kept or {}
        self.step: float = given.get("step", FIRST_STEP)
        self.counts: Counter[int] = Counter({int(key): n for key, n in given.get("counts", ())})
        self.n: int = given.get("n", 0)
        self.sum: float = given.get("sum", 0.0)
        self.min: float | None = given.get("min")
        self.max: float | None = given.get("max")
        self.zeros: int = given.get("zeros", 0)
        self.ones: int = given.get("ones", 0)

    def add(self, value: float) -> None:
        """Count a finite number."""
        self.n += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)
        self.zeros += value == 0.0
        self.ones += value == 1.0
        self.counts[round(value / self.step)] += 1
        while len(self.counts) > MAX_KEYS:
            self._coarsen()

    def _coarsen(self) -> None:
        merged: Counter[int] = Counter()
        for key, n in self.counts.items():
            merged[round(key / 2)] += n
        self.step *= 2
        self.counts = merged

    def document(self) -> dict[str, Any]:
        """Return the sketch as a JSON object."""
        return {
            "step": self.step,
            "counts": sorted(self.counts.items()),
            "n": self.n,
            "sum": self.sum,
            "min": self.min,
            "max": self.max,
            "zeros": self.zeros,
            "ones": self.ones,
        }

    def histogram(self) -> dict[str, Any]:
        """Return {bins, min, max, n, mean, zeros, ones}: BINS counts of equal parts of min..max.

        A number is counted at most half a step away from where it is. If all numbers are equal, the first
        bin has all of them.
        """
        bins = [0] * BINS
        if self.n:
            assert self.min is not None
            assert self.max is not None
            width = (self.max - self.min) / BINS
            for key, n in self.counts.items():
                place = 0 if width <= 0 else int((key * self.step - self.min) / width)
                bins[min(max(place, 0), BINS - 1)] += n
        return {
            "bins": bins,
            "min": self.min,
            "max": self.max,
            "n": self.n,
            "mean": self.sum / self.n if self.n else None,
            "zeros": self.zeros,
            "ones": self.ones,
        }


MAX_VERSIONS: Final = 200
MAX_BUCKETS: Final = 200
FIRST_BUCKET: Final = 10
"""The width in seconds of the first buckets of time."""
MAX_REASONS: Final = 64
MAX_MESSAGE: Final = 256
"""The number of characters of the newest failure's message that are kept for each reason."""
OTHER: Final = "Other"
"""The reason under which those beyond MAX_REASONS are counted."""
_STAGES: Final = ("init", "run", "eval")


@dataclass(frozen=True, slots=True)
class EndedView:
    """What statistics take of an ended rollout."""

    id: str
    state: RolloutState
    reward: float | None
    reason: str | None
    message: str | None
    tokens: int
    ended_at: float
    policy_index: int | None
    timings: Mapping[str, Any]
    """The decoded timings of its row, with what `traces` keeps."""


class Statistics:
    """The statistics of one job.

    Args:
        kept: What `document` returned before, or None at the beginning.
    """

    def __init__(self, kept: dict[str, Any] | None = None) -> None:
        given = kept or {}
        self.rewards = Sketch(given.get("rewards"))
        self.versions: dict[int, list[float]] = {int(k): v for k, v in given.get("versions", ())}
        self.width: int = given.get("width", FIRST_BUCKET)
        self.times: dict[int, list[float]] = {int(k): v for k, v in given.get("times", ())}
        self.failures: dict[str, list[Any]] = given.get("failures", {})
        self.truncated: dict[str, int] = given.get("truncated", {})
        self.stages: dict[str, list[float]] = given.get("stages", {stage: [0.0, 0.0, 0] for stage in _STAGES})
        self.seconds: list[float] = given.get("seconds", [0.0, 0.0, 0.0])
        self.tokens: int = given.get("tokens", 0)
        self.calls: int = given.get("calls", 0)
        self.turns: int = given.get("turns", 0)
        self.last: float | None = given.get("last")
        """When the last rollout ended."""

    def add(self, one: EndedView) -> None:
        """Add an ended rollout."""
        if one.reward is not None:
            self.rewards.add(one.reward)
            self._add_version(one.policy_index or 0, one.reward)
        self._add_time(one)
        kept = one.timings.get(traces.KEY, {})
        if one.state == RolloutState.FAILED:
            self._add_failure(one, kept)
        if cut := kept.get("cut"):
            name = cut if cut in self.truncated or len(self.truncated) < MAX_REASONS else OTHER
            self.truncated[name] = self.truncated.get(name, 0) + 1
        for stage in _STAGES:
            if entry := one.timings.get(stage):
                sums = self.stages[stage]
                sums[0] += entry.get("queued_seconds", 0.0)
                sums[1] += entry.get("active_seconds", 0.0)
                sums[2] += entry.get("attempts", 0)
        for place, name in enumerate(("model_seconds", "tool_seconds", "own_seconds")):
            self.seconds[place] += one.timings.get(name, 0.0)
        self.tokens += one.tokens
        self.calls += kept.get("calls", 0)
        self.turns += kept.get("turns", 0)
        self.last = one.ended_at if self.last is None else max(self.last, one.ended_at)

    def _add_version(self, index: int, reward: float) -> None:
        sums = self.versions.setdefault(index, [0, 0.0])
        sums[0] += 1
        sums[1] += reward
        if len(self.versions) > MAX_VERSIONS:
            del self.versions[min(self.versions)]

    def _add_time(self, one: EndedView) -> None:
        sums = self.times.setdefault(int(one.ended_at // self.width), [0, 0, 0.0, 0])
        sums[0] += 1
        sums[3] += one.tokens
        if one.reward is not None:
            sums[1] += 1
            sums[2] += one.reward
        while len(self.times) > MAX_BUCKETS:
            merged: dict[int, list[float]] = {}
            for key, value in self.times.items():
                into = merged.setdefault(key // 2, [0, 0, 0.0, 0])
                for place, number in enumerate(value):
                    into[place] += number
            self.width *= 2
            self.times = merged

    def _add_failure(self, one: EndedView, kept: Mapping[str, Any]) -> None:
        places = kept.get("at")
        stage = BY_NUMBER[places[-2]].stage if places else "init"
        reason = one.reason or ""
        if reason not in self.failures and len(self.failures) >= MAX_REASONS:
            reason = OTHER
        before = self.failures.get(reason, [0])
        # The newest example is the one whose pod, log and node are most likely still there.
        self.failures[reason] = [before[0] + 1, stage, one.id, (one.message or "")[:MAX_MESSAGE]]

    def document(self) -> dict[str, Any]:
        """Return the statistics as a JSON object for the database."""
        return {
            "rewards": self.rewards.document(),
            "versions": sorted(self.versions.items()),
            "width": self.width,
            "times": sorted(self.times.items()),
            "failures": self.failures,
            "truncated": self.truncated,
            "stages": self.stages,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "calls": self.calls,
            "turns": self.turns,
            "last": self.last,
        }

    def view(self, labels: Mapping[int, str]) -> dict[str, Any]:
        """Return the statistics as the API answers them.

        Args:
            labels: The policy version of each index that is known.
        """
        by_count = sorted(self.failures.items(), key=lambda item: (-item[1][0], item[0]))
        return {
            "rewards": self.rewards.histogram(),
            "by_version": [
                {"version": labels.get(index, ""), "index": index, "n": n, "mean": total / n}
                for index, (n, total) in sorted(self.versions.items())
            ],
            "by_time": [
                {
                    "start": key * self.width,
                    "seconds": self.width,
                    "n": n,
                    "mean": total / rewarded if rewarded else None,
                    "tokens": tokens,
                }
                for key, (n, rewarded, total, tokens) in sorted(self.times.items())
            ],
            "failures": [
                {"reason": reason, "n": n, "stage": stage, "example": example, "message": message}
                for reason, (n, stage, example, message) in by_count
            ],
            "truncated": [
                {"reason": reason, "n": n}
                for reason, n in sorted(self.truncated.items(), key=lambda item: (-item[1], item[0]))
            ],
            "stages": {
                stage: {"queued": round(queued, 3), "active": round(active, 3), "n": n}
                for stage, (queued, active, n) in self.stages.items()
            },
            "model_seconds": round(self.seconds[0], 3),
            "tool_seconds": round(self.seconds[1], 3),
            "own_seconds": round(self.seconds[2], 3),
            "tokens": self.tokens,
            "tool_calls": self.calls,
            "turns": self.turns,
            "last_ended_at": self.last,
        }
