"""The checks that every demo's run must pass, judged by its own trajectories."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARALLEL = ("loss_mask", "logprobs", "policy_versions")
Expect = Callable[[str, object, bool], None]


def of_half(folder: Path, tasks: int, samples: int, expect: Expect) -> list[dict[str, Any]]:
    """Check summary.json of either half against its own trajectories, and return these."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
    wanted = tasks * samples
    expect(f"trajectories, not {wanted}", len(rows), len({row["id"] for row in rows}) == len(rows) == wanted)
    places = {(row["task_id"], row["sample_index"]) for row in rows}
    expect(f"tasks and samples, not {wanted} pairs", len(places), len(places) == wanted)
    expect(f"groups, not {tasks}", summary["groups"], summary["groups"] == tasks)
    for name, value in (("rollouts", wanted), ("succeeded", wanted), ("failed", 0), ("cancelled", 0)):
        expect(f"{name}, not {value}", summary[name], summary[name] == value)
    rewarded = sum(row["reward"] is not None for row in rows)
    expect(f"rollouts with a reward, not {wanted}", rewarded, rewarded == wanted)
    sampled = sum(sum(segment["loss_mask"]) for row in rows for segment in row["segments"])
    expect(f"tokens, not {sampled}", summary["tokens_sampled"], summary["tokens_sampled"] == sampled > 0)
    expect("a rollout without a turn", "", all(row["turns"] for row in rows))
    for row in rows:
        for segment in row["segments"]:
            lengths = {name: len(segment[name]) for name in ("response_ids", *PARALLEL)}
            expect(f"{row['id']}: parallel lists", lengths, len(set(lengths.values())) == 1)
            own = [one for one, mask in zip(segment["logprobs"], segment["loss_mask"], strict=False) if mask]
            wrong = [one for one in own if not (math.isfinite(one) and one <= 0)]
            expect(f"{row['id']}: log-probabilities of sampled tokens", wrong, not wrong)
        # Every sampled token belongs to exactly one turn, so nothing of an interrupted attempt is left.
        masked = [place for s, one in enumerate(row["segments"]) for place in sampled_places(s, one)]
        turns = [(turn["segment"], at) for turn in row["turns"] for at in range(turn["start"], turn["end"])]
        expect(f"{row['id']}: tokens of the turns", len(turns), sorted(turns) == masked)
    return rows


def sampled_places(number: int, segment: dict[str, Any]) -> list[tuple[int, int]]:
    """Return where the segment's sampled tokens lie."""
    return [(number, place) for place, mask in enumerate(segment["loss_mask"]) if mask]
