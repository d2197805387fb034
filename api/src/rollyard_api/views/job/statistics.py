"""The statistics of a job, which are updated as rollouts end instead of being counted for each request.

They are bounded: the newest policy versions, a fixed number of time buckets that grow wider, and the most
frequent reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, field, structs
from rollyard_crds.rolloutjob import STAGES

from rollyard_api.machine.states import BY_NUMBER, RolloutState
from rollyard_api.trajectories import traces

MAX_KEYS: Final = 512
FIRST_STEP: Final = 2.0**-10
BINS: Final = 20


class Sketch(Struct):
    """A histogram of any numbers in bounded space, which need not know their range in advance.

    Numbers are counted by the nearest multiple of a step, a power of two. The step doubles whenever more than
    MAX_KEYS multiples are in use, and the counts are merged. Rewards are usually a few values from 0 to 1,
    which the first step separates. The minimum, the maximum, the sum, and the numbers of zeros and ones are
    exact.
    """

    step: float = FIRST_STEP
    counts: dict[int, int] = field(default_factory=dict)
    """How many numbers are nearest to each multiple of the step."""
    n: int = 0
    sum: float = 0.0
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    ones: int = 0

    def add(self, value: float) -> None:
        """Count a finite number."""
        self.n += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)
        self.zeros += value == 0.0
        self.ones += value == 1.0
        key = round(value / self.step)
        self.counts[key] = self.counts.get(key, 0) + 1
        while len(self.counts) > MAX_KEYS:
            self._coarsen()

    def _coarsen(self) -> None:
        merged: Counter[int] = Counter()
        for key, n in self.counts.items():
            merged[round(key / 2)] += n
        self.step *= 2
        self.counts = merged

    def histogram(self) -> dict[str, Any]:
        """Return {bins, min, max, n, mean, zeros, ones}: BINS counts of equal parts of min..max.

        A number is counted at most half a step away from its value. If all numbers are equal, the first
        bin has all of them.
        """
        bins = [0] * BINS
        if self.min is not None and self.max is not None:
            width = (self.max - self.min) / BINS
            for key, n in self.counts.items():
                index = 0 if width <= 0 else int((key * self.step - self.min) / width)
                bins[min(max(index, 0), BINS - 1)] += n
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
_SECONDS: Final = ("model_seconds", "tool_seconds", "own_seconds")


class VersionSums(Struct):
    """The rollouts with a reward of one policy version, and the sum of their rewards."""

    n: int = 0
    total: float = 0.0


class TimeSums(Struct):
    """What ended within one bucket of time."""

    n: int = 0
    rewarded: int = 0
    total: float = 0.0
    tokens: int = 0


class StageSums(Struct):
    """The seconds of all rollouts in the queue of a stage and in the stage itself, and its attempts."""

    queued: float = 0.0
    active: float = 0.0
    n: int = 0


class Failures(Struct):
    """The failures of one reason, with the stage, the id and the message of the newest."""

    n: int
    stage: str
    example: str
    message: str


class Statistics(Struct):
    """The statistics of one job, which the database keeps as JSON."""

    rewards: Sketch = field(default_factory=Sketch)
    versions: dict[int, VersionSums] = field(default_factory=dict)
    width: int = FIRST_BUCKET
    """The seconds of each bucket of time."""
    times: dict[int, TimeSums] = field(default_factory=dict)
    failures: dict[str, Failures] = field(default_factory=dict)
    truncated: dict[str, int] = field(default_factory=dict)
    stages: dict[str, StageSums] = field(default_factory=lambda: {stage: StageSums() for stage in STAGES})
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SECONDS, 0.0))
    """The sum of each of these timings."""
    tokens: int = 0
    calls: int = 0
    turns: int = 0
    last: float | None = None
    """When the last rollout ended."""

    def add(self, row: Any, timings: Mapping[str, Any]) -> None:
        """Add an ended rollout.

        Args:
            row: Its row, as `folding` reads it.
            timings: The row's decoded timings, with what `traces` keeps.
        """
        if row.reward is not None:
            self.rewards.add(row.reward)
            self._add_version(row.policy_index or 0, row.reward)
        self._add_time(row)
        trace = timings.get(traces.KEY, {})
        if row.state == RolloutState.FAILED:
            self._add_failure(row, trace)
        if cut := trace.get("cut"):
            name = cut if cut in self.truncated or len(self.truncated) < MAX_REASONS else OTHER
            self.truncated[name] = self.truncated.get(name, 0) + 1
        for stage, sums in self.stages.items():
            if entry := timings.get(stage):
                sums.queued += entry.get("queued_seconds", 0.0)
                sums.active += entry.get("active_seconds", 0.0)
                sums.n += entry.get("attempts", 0)
        for name in _SECONDS:
            self.seconds[name] += timings.get(name, 0.0)
        self.tokens += row.tokens
        self.calls += trace.get("calls", 0)
        self.turns += trace.get("turns", 0)
        self.last = row.ended_at if self.last is None else max(self.last, row.ended_at)

    def _add_version(self, index: int, reward: float) -> None:
        sums = self.versions.setdefault(index, VersionSums())
        sums.n += 1
        sums.total += reward
        if len(self.versions) > MAX_VERSIONS:
            del self.versions[min(self.versions)]

    def _add_time(self, row: Any) -> None:
        sums = self.times.setdefault(int(row.ended_at // self.width), TimeSums())
        sums.n += 1
        sums.tokens += row.tokens
        if row.reward is not None:
            sums.rewarded += 1
            sums.total += row.reward
        while len(self.times) > MAX_BUCKETS:
            merged: dict[int, TimeSums] = {}
            for key, value in self.times.items():
                into = merged.setdefault(key // 2, TimeSums())
                into.n += value.n
                into.rewarded += value.rewarded
                into.total += value.total
                into.tokens += value.tokens
            self.width *= 2
            self.times = merged

    def _add_failure(self, row: Any, trace: Mapping[str, Any]) -> None:
        places = trace.get("at")
        stage = BY_NUMBER[places[-2]].stage if places else "init"
        reason = row.reason or ""
        if reason not in self.failures and len(self.failures) >= MAX_REASONS:
            reason = OTHER
        n = self.failures[reason].n + 1 if reason in self.failures else 1
        # The newest example is the one whose pod, log and node are most likely still there.
        self.failures[reason] = Failures(n, stage or "", row.id, (row.message or "")[:MAX_MESSAGE])

    def view(self, labels: Mapping[int, str]) -> dict[str, Any]:
        """Return the statistics as the API returns them.

        Args:
            labels: The policy version of each index that is known.
        """
        by_count = sorted(self.failures.items(), key=lambda item: (-item[1].n, item[0]))
        return {
            "rewards": self.rewards.histogram(),
            "by_version": [
                {"version": labels.get(index, ""), "index": index, "n": sums.n, "mean": sums.total / sums.n}
                for index, sums in sorted(self.versions.items())
            ],
            "by_time": [
                {
                    "start": key * self.width,
                    "seconds": self.width,
                    "n": sums.n,
                    "mean": sums.total / sums.rewarded if sums.rewarded else None,
                    "tokens": sums.tokens,
                }
                for key, sums in sorted(self.times.items())
            ],
            "failures": [{"reason": reason, **structs.asdict(failure)} for reason, failure in by_count],
            "truncated": [
                {"reason": reason, "n": n}
                for reason, n in sorted(self.truncated.items(), key=lambda item: (-item[1], item[0]))
            ],
            "stages": {
                stage: {"queued": round(sums.queued, 3), "active": round(sums.active, 3), "n": sums.n}
                for stage, sums in self.stages.items()
            },
            **{name: round(seconds, 3) for name, seconds in self.seconds.items()},
            "tokens": self.tokens,
            "tool_calls": self.calls,
            "turns": self.turns,
            "last_ended_at": self.last,
        }
