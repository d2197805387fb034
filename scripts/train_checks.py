"""The checks that a run of demo-train must pass, judged by its own trajectories and metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from demo_checks import Expectations, read_lines

COLUMNS = ("seeds", "steps", "success_before", "success_after", "wall_seconds", "rollouts")
RATIO_TOLERANCE = 1e-3
"""By how much the importance ratio of tokens of the newest weights may differ from 1."""


def sampled_versions(rows: list[dict[str, Any]]) -> set[str]:
    """Return the policy versions of the sampled tokens."""
    return {
        version
        for row in rows
        for segment in row["segments"]
        for version, mask in zip(segment["policy_versions"], segment["loss_mask"], strict=True)
        if mask
    }


def standard_errors(before: list[float], after: list[float]) -> float:
    """Return by how many standard errors the second share of successes is above the first.

    It is the z of the test of two proportions with a pooled variance. The samples of one task hang together,
    so it is rather too large; a check must ask for more than the usual 2.
    """
    pooled = (sum(before) + sum(after)) / (len(before) + len(after))
    error = math.sqrt(max(pooled * (1 - pooled), 1e-9) * (1 / len(before) + 1 / len(after)))
    return (sum(after) / len(after) - sum(before) / len(before)) / error


def check_measurement(
    folder: Path, name: str, version: str, success: float, expect: Expectations
) -> list[float]:
    """Check the measurement on the held-out tasks before or after the training, and return its rewards.

    Args:
        folder: The folder of the run.
        name: `before` or `after`.
        version: The policy version of all sampled tokens.
        success: The mean of the rewards by the summary.
        expect: What takes the problems.
    """
    rows = read_lines(folder / f"held-out-{name}.jsonl")
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    without = len(rows) - len(rewards)
    expect(f"rollouts {name} without a reward", rows and without, bool(rows) and without == 0)
    sampled = sampled_versions(rows)
    expect(f"versions {name}, not {version}", sampled, sampled == {version})
    mean = sum(rewards) / max(1, len(rewards))
    expect(f"success {name}, not {mean:.4f}", success, math.isclose(mean, success, abs_tol=1e-9))
    return rewards


def check_run(folder: Path, run: dict[str, Any], rise: float, expect: Expectations) -> None:
    """Check one run by its own trajectories and metrics.

    `run` has one value of each column of the summary.
    """
    name, last = folder.name, run["steps"]
    before = check_measurement(folder, "before", f"{name}-0", run["success_before"], expect)
    after = check_measurement(folder, "after", f"{name}-{last}", run["success_after"], expect)
    if before and after:
        errors = standard_errors(before, after)
        expect(f"success rises by less than {rise} standard errors", errors, errors >= rise)
    steps = [line for line in read_lines(folder / "metrics.jsonl") if "success" in line]
    numbers = [step["step"] for step in steps]
    expect(f"steps, not 1 to {last}", numbers, numbers == list(range(1, last + 1)))
    versions = [step["policy_version"] for step in steps]
    expect("policy versions of the steps", versions, versions == [f"{name}-{number}" for number in numbers])
    ratios = [step["update"]["fresh_ratio_error"] for step in steps]
    fresh = all(0 <= ratio <= RATIO_TOLERANCE for ratio in ratios)
    expect("importance ratios of fresh tokens", ratios, fresh)
    old_tokens = [step["update"]["old_tokens"] for step in steps]
    lags = [step["lag"]["max"] for step in steps]
    explained = all(lag > 0 or count == 0 for lag, count in zip(lags, old_tokens, strict=True))
    expect("old tokens where the lag is 0", old_tokens, explained)
    rollouts = sum(step["rollouts"] for step in steps)
    expect(f"rollouts, not {rollouts}", run["rollouts"], run["rollouts"] == rollouts > 0)


def check_training(out: Path, rise: float, expect: Expectations) -> None:
    """Check the runs below `out`, in each of which success rises by at least `rise` standard errors."""
    summary = json.loads((out / "summary.json").read_text())
    expect("columns", sorted(summary), sorted(summary) == sorted(COLUMNS))
    counts = {len(values) for values in summary.values()}
    expect("entries of the columns, not one a seed", counts, len(counts) == 1 and counts != {0})
    if expect.problems:
        return
    for index, seed in enumerate(summary["seeds"]):
        run = {name: values[index] for name, values in summary.items()}
        check_run(out / f"seed-{seed}", run, rise, expect.part(f"seed-{seed}"))
    picture = out / "curve.svg"
    expect("no picture", picture, picture.is_file() and "<svg" in picture.read_text())
