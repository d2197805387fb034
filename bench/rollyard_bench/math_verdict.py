"""The comparison of one mathematical answer with the expected one, beside math-verify alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from math_verify import parse, verify
from rollyard_pipeline.handlers.comparison import compare
from rollyard_testing.pipeline.math_pairs import Pair, pairs

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.stats import Sample

SEEDS = 1000  # Each is an equal pair and a different one.
WARM_UP = 100
"""The seeds before the clock. latex2sympy's parser learns its decisions, as in a worker's child."""


def _ours(pair: Pair) -> bool:
    return bool(compare(pair.key, pair.said)[0])


def _math_verify(pair: Pair) -> bool:
    gold, answer = (parse(text, parsing_timeout=None) for text in (f"${pair.key}$", pair.said))
    return bool(verify(gold, answer, timeout_seconds=None))


def _timed(judge: Callable[[Pair], bool], pair: Pair) -> tuple[float, bool]:
    """Return the milliseconds of a verdict, and whether it is right."""
    begin = time.process_time()
    equal = judge(pair)
    return (time.process_time() - begin) * 1e3, equal == pair.equal


async def measure(settings: Settings) -> list[Measurement]:
    """Judge the same seeded pairs by both, in turns."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns of the missing timeouts.
    seeds = SEEDS // 4 if settings.quick else SEEDS
    judges = (_ours, _math_verify)
    times: tuple[list[float], list[float]] = ([], [])
    right = [0, 0]
    for seed in range(WARM_UP + seeds):
        for pair in pairs(seed):
            for place, judge in enumerate(judges):
                took, agrees = _timed(judge, pair)
                if seed >= WARM_UP:
                    times[place].append(took)
                    right[place] += agrees
    ours, theirs = (Sample(tuple(values)) for values in times)
    count = 2 * seeds
    how = (
        f"{count} seeded pairs, half of them equal, judged in turns in one process; processor time of one "
        f"comparison, 99th percentile (median {ours.p50:.1f} ms against {theirs.p50:.1f} ms); "
        f"right: {right[0]} against {right[1]} of {count}"
    )
    return [Measurement("math_verdict", ours.p99, Baseline("math-verify alone", theirs.p99), how)]
