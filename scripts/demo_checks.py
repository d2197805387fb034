"""The checks that a demo of two halves must pass, judged by its own trajectories."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PARALLEL = ("response_ids", "loss_mask", "logprobs", "policy_versions")


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


def check_half(folder: Path, tasks: int, samples: int, expect: Expectations) -> list[dict[str, Any]]:
    """Check summary.json of either half against its own trajectories, and return these."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = read_lines(folder / "trajectories.jsonl")
    total = tasks * samples
    expect(f"trajectories, not {total}", len(rows), len({row["id"] for row in rows}) == len(rows) == total)
    pairs = {(row["task_id"], row["sample_index"]) for row in rows}
    expect(f"tasks and samples, not {total} pairs", len(pairs), len(pairs) == total)
    expect(f"groups, not {tasks}", summary["groups"], summary["groups"] == tasks)
    for name, value in (("rollouts", total), ("succeeded", total), ("failed", 0), ("cancelled", 0)):
        expect(f"{name}, not {value}", summary[name], summary[name] == value)
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
