"""The record of what a job delivered, kept outside the product and judged against what was submitted."""

from __future__ import annotations

import json
import threading
from collections.abc import Set
from typing import Any

import httpx


class Ledger:
    """Every trajectory that the server ever showed, in the order seen. Nothing seen may change or vanish."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        self._cursor = ""
        self._grown = threading.Condition()
        self._reading = threading.Lock()

    def note(self, record: dict[str, Any]) -> None:
        """Enter one delivered trajectory."""
        key = record["id"]
        before = self.seen.get(key)
        if before is not None and before != record:
            self.faults.append(f"{key} changed after it was delivered")
        elif before is not None:
            self.faults.append(f"{key} was delivered twice on one cursor")
        with self._grown:
            self.seen[key] = record
            self._grown.notify_all()

    def wait_for(self, count: int, seconds: float) -> bool:
        """Wait until `count` rollouts have ended, and return whether they have."""
        with self._grown:
            return self._grown.wait_for(lambda: len(self.seen) >= count, seconds)

    def read(self, http: httpx.Client, job: str) -> None:
        """Enter everything past the cursor, and move the cursor with it.

        Only one reader may run at a time.
        """
        with self._reading:
            while self._read_page(http, job):
                pass

    def _read_page(self, http: httpx.Client, job: str) -> int:
        params: dict[str, str | int] = {"cursor": self._cursor, "limit": 100}
        answer = http.get(f"/v1/rolloutjobs/{job}/trajectories", params=params)
        answer.raise_for_status()
        cursor = answer.headers["Rollyard-Cursor"]
        records = [json.loads(line) for line in answer.text.splitlines() if line.strip()]
        for record in records:
            self.note(record)
        self._cursor = cursor
        return len(records)

    def judge(self, expected: Set[tuple[str, int]]) -> list[str]:
        """Return the problems, if any, against the (task, sample) pairs that were submitted."""
        got: dict[tuple[str, int], list[str]] = {}
        for key, record in self.seen.items():
            got.setdefault((record["task_id"], record["sample_index"]), []).append(key)
        problems = list(self.faults)
        problems += [f"no result for {pair}" for pair in sorted(expected - set(got))]
        problems += [f"result for {pair}, never submitted" for pair in sorted(set(got) - expected)]
        problems += [f"{len(keys)} results for {pair}" for pair, keys in got.items() if len(keys) > 1]
        for key, record in self.seen.items():
            problems += [f"{key} {problem}" for problem in _problems(record)]
        return problems


def _problems(record: dict[str, Any]) -> list[str]:
    status, reward, reason = record["status"], record["reward"], record["reason"]
    problems = []
    if status == "succeeded" and reward is None:
        problems.append("succeeded without a reward")
    if status != "succeeded" and (reward is not None or not reason):
        problems.append(f"is {status} with reward {reward} and reason {reason!r}")
    if status == "succeeded" and not record["segments"]:
        problems.append("succeeded without a segment")
    for segment in record["segments"]:
        sizes = {len(segment[name]) for name in ("response_ids", "loss_mask", "logprobs", "policy_versions")}
        if len(sizes) != 1:
            problems.append("has a segment of unequal lengths")
    return problems
