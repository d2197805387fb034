"""The ledger of a trainer, judged against what the control plane delivered.

Nothing here imports Rollyard or the trainer: both sides are read as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

PAGE = 64
CONSUMER = "trainer"


def ledger_of(checkpoints: Path) -> list[dict[str, Any]]:
    """Return the ledger of a run, step after step."""
    return [
        json.loads(line)
        for path in sorted(checkpoints.glob("step-????/used.jsonl"))
        for line in path.read_text().splitlines()
    ]


def delivered(http: httpx.Client, job: str, namespace: str = "default") -> list[tuple[dict[str, Any], str]]:
    """Return all groups of a job in the order in which they ended, each with the cursor after it."""
    found: list[tuple[dict[str, Any], str]] = []
    cursor = ""
    while True:
        params: dict[str, str | int] = {
            "namespace": namespace, "cursor": cursor, "limit": PAGE, "dropped": "true",
        }  # fmt: skip
        answer = http.get(f"/v1/rolloutjobs/{job}/groups", params=params)
        answer.raise_for_status()
        lines = [json.loads(line) for line in answer.text.splitlines() if line.strip()]
        if not lines:
            return found
        begin, _, steps = answer.headers["Rollyard-Cursors"].partition(";")
        place = 0
        for line, step in zip(lines, steps.split(","), strict=True):
            place += int(step)
            found.append((line, f"{begin}{place}"))
        cursor = answer.headers["Rollyard-Cursor"]


def acknowledged(http: httpx.Client, job: str, namespace: str = "default") -> str:
    """Return the cursor that the trainer has acknowledged."""
    answer = http.get(f"/v1/rolloutjobs/{job}/cursors/{CONSUMER}", params={"namespace": namespace})
    answer.raise_for_status()
    return str(answer.json()["cursor"])


def problems(
    ledger: list[dict[str, Any]],
    groups: list[tuple[Mapping[str, Any], str]] | list[tuple[dict[str, Any], str]],
    cursor: str,
    steps: int,
    wanted: int,
) -> list[str]:
    """Return what is wrong with a ledger: rollouts that were lost or used twice, or steps that are short.

    Args:
        ledger: The ledger of the run.
        groups: The groups that the control plane delivered, each with the cursor after it.
        cursor: The cursor that the trainer has acknowledged last.
        steps: The steps that the run has taken.
        wanted: The groups that each of them trains on.
    """
    ends = [after for _, after in groups]
    if cursor not in ends:
        return [f"the acknowledged cursor {cursor} is behind none of {len(groups)} groups"]
    read = [group for group, _ in groups[: ends.index(cursor) + 1]]
    found = []
    for place, (line, group) in enumerate(zip(ledger, read, strict=False)):
        rollouts = [one["id"] for one in group["trajectories"]]
        if (line["group"], line["rollouts"]) != (group["group_id"], rollouts):
            found.append(
                f"group {place} of the ledger is {line['group']}, the control plane has {group['group_id']}"
            )
    if len(ledger) != len(read):
        found.append(f"the ledger has {len(ledger)} groups, {len(read)} lie before the acknowledged cursor")
    used = Counter(rollout for line in ledger for rollout in line["rollouts"])
    found += [f"{rollout} was used {times} times" for rollout, times in used.items() if times > 1]
    pushed = Counter(group["task_id"] for group, _ in groups)
    found += [f"task {task} was played {times} times" for task, times in pushed.items() if times > 1]
    trained = Counter(line["step"] for line in ledger if line["use"] == "trained")
    if trained != Counter(dict.fromkeys(range(1, steps + 1), wanted)):
        found.append(f"the steps trained on {dict(trained)} groups, each of {steps} wants {wanted}")
    return found
