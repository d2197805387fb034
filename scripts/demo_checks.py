"""The checks that a run of a demo must pass, judged by its own trajectories and metrics."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

PARALLEL = ("response_ids", "loss_mask", "logprobs", "policy_versions")
COLUMNS = ("seeds", "steps", "success_before", "success_after", "wall_seconds", "rollouts")
RATIO_TOLERANCE = 1e-3
"""By how much the importance ratio of tokens of the newest weights may differ from 1."""


class Expectations:
    """What a run must be like, and a line for each thing that it is not."""

    def __init__(self, problems: list[str], prefix: str = "") -> None:
        self.problems = problems
        self._prefix = prefix

    def __call__(self, what: str, value: object, holds: bool) -> None:
        """Note a problem, and the value that shows it, unless the expectation holds."""
        if not holds:
            self.problems.append(f"{self._prefix}{what}: {value}")

    def part(self, name: str) -> Expectations:
        """Return the expectations of a part of the run, whose name stands before its problems."""
        return Expectations(self.problems, f"{self._prefix}{name}: ")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens_by_version(rows: list[dict[str, Any]]) -> Counter[str]:
    """Return the number of sampled tokens of each policy version."""
    return Counter(
        version
        for row in rows
        for segment in row["segments"]
        for version, mask in zip(segment["policy_versions"], segment["loss_mask"], strict=True)
        if mask
    )


def check_counts(summary: dict[str, Any], total: int, expect: Expectations) -> None:
    """Check that all rollouts of a summary have succeeded."""
    for name, value in (("rollouts", total), ("succeeded", total), ("failed", 0), ("cancelled", 0)):
        expect(f"{name}, not {value}", summary[name], summary[name] == value)


def check_half(folder: Path, tasks: int, samples: int, expect: Expectations) -> list[dict[str, Any]]:
    """Check summary.json of either half against its own trajectories, and return these."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_lines(folder / "trajectories.jsonl")
    total = tasks * samples
    expect(f"trajectories, not {total}", len(rows), len({row["id"] for row in rows}) == len(rows) == total)
    pairs = {(row["task_id"], row["sample_index"]) for row in rows}
    expect(f"tasks and samples, not {total} pairs", len(pairs), len(pairs) == total)
    expect(f"groups, not {tasks}", summary["groups"], summary["groups"] == tasks)
    check_counts(summary, total, expect)
    rewarded = sum(row["reward"] is not None for row in rows)
    expect(f"rollouts with a reward, not {total}", rewarded, rewarded == total)
    sampled = sum(sum(segment["loss_mask"]) for row in rows for segment in row["segments"])
    expect(f"tokens, not {sampled}", summary["tokens_sampled"], summary["tokens_sampled"] == sampled > 0)
    expect("a rollout without a turn", "", all(row["turns"] for row in rows))
    for row in rows:
        check_tokens(row, expect.part(row["id"]))
    return rows


def check_tokens(row: dict[str, Any], expect: Expectations) -> None:
    """Check the lists of one trajectory, and that its turns consist of its sampled tokens."""
    sampled = []
    for number, segment in enumerate(row["segments"]):
        lengths = {name: len(segment[name]) for name in PARALLEL}
        expect("parallel lists", lengths, len(set(lengths.values())) == 1)
        masks = segment["loss_mask"]
        logprobs = [value for value, mask in zip(segment["logprobs"], masks, strict=False) if mask]
        wrong = [value for value in logprobs if not (math.isfinite(value) and value <= 0)]
        expect("log-probabilities of sampled tokens", wrong, not wrong)
        sampled += [(number, index) for index, mask in enumerate(masks) if mask]
    # Every sampled token belongs to exactly one turn, so nothing of an interrupted attempt is left.
    turns = [(turn["segment"], index) for turn in row["turns"] for index in range(turn["start"], turn["end"])]
    expect("tokens of the turns", len(turns), sorted(turns) == sampled)


def check_vllm_half(
    folder: Path, tasks: int, samples: int, required: bool, expect: Expectations
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Check the half on vLLM as every half, and return its summary and its trajectories.

    A run without it returns None, which is a problem if the half is required.
    """
    summary = json.loads((folder / "summary.json").read_text())["vllm"]
    if "skipped" in summary:
        expect("there is no half on vLLM", summary["skipped"], not required)
        return None
    rows = check_half(folder / "vllm", tasks, samples, expect)
    own = json.loads((folder / "vllm" / "summary.json").read_text())
    expect("two summaries differ", "", own.items() <= summary.items())
    return summary, rows


def check_backend_loss(
    summary: dict[str, Any], rollouts_ended: int, rows: list[dict[str, Any]], expect: Expectations
) -> None:
    """Check the half on vLLM: its backend was killed in the middle, and another one did the rest.

    Args:
        summary: The summary of this half.
        rollouts_ended: The number of rollouts that had ended before.
        rows: The trajectories of this half.
        expect: What takes the problems.
    """
    total = len(rows)
    in_the_middle = total / 3 <= rollouts_ended < total
    expect("rollouts when its backend was killed, not in the middle", rollouts_ended, in_the_middle)
    first, second = (backend["url"] for backend in summary["backends"])
    served = {url: sum(row["backend"] == url for row in rows) for url in (first, second)}
    expect("rollouts of others than the two backends", served, sum(served.values()) == total)
    if len(served) == 2:
        by_first = served[first]
        expected = rollouts_ended <= by_first < total
        expect(f"rollouts of the first backend, not {rollouts_ended} and some", by_first, expected)
    seconds = summary["seconds_without_backend"]
    expect("seconds without a backend", seconds, seconds > 0)


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
    sampled = set(tokens_by_version(rows))
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
