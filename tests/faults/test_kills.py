"""kill -9 of every part, in the middle of the quickstart, at seeded random times, five runs each.

The run must still end with every rollout accounted for exactly once and nothing left behind,
judged by a ledger and by listings from outside the product.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from yard import ROOT, Ledger, Yard, following, read_once

TASKS = 8
SAMPLES = 4
SEEDS = range(5)
END = 150.0  # seconds for a killed run to end; an undisturbed one takes about ten

pytestmark = [
    pytest.mark.faults,
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


def quickstart_job(name: str) -> tuple[dict[str, Any], set[tuple[str, int]]]:
    """The quickstart job over its first tasks, and the (task, sample) pairs that it must account for."""
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart/job.yaml").read_text())
    lines = (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()[:TASKS]
    tasks = [json.loads(line) for line in lines]
    job["metadata"] = {"name": name}
    job["spec"]["tasks"] = {"inline": tasks}
    job["spec"]["samplesPerTask"] = SAMPLES
    return job, {(task["id"], sample) for task in tasks for sample in range(SAMPLES)}


def wait_finished(yard: Yard, name: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    job: dict[str, Any] = {}
    while time.monotonic() < deadline:
        try:
            with yard.http() as http:
                job = http.get(f"/v1/rolloutjobs/{name}").raise_for_status().json()
        except (OSError, KeyError, ValueError, httpx.HTTPError):
            time.sleep(0.2)
            continue
        if any(c["type"] == "Finished" and c["status"] == "True" for c in job["status"]["conditions"]):
            return job
        time.sleep(0.2)
    raise AssertionError(
        f"{name} did not finish in {seconds:.0f} s: {json.dumps(job.get('status'), indent=1)}"
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("victim", ["control-plane", "worker", "backend", "sandbox"])
def test_every_rollout_is_accounted_for_exactly_once(victim: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{victim}-{seed}")
    yard = Yard(tmp_path / "y")
    yard.start()
    ledger = Ledger()
    killed = 0
    try:
        job, expected = quickstart_job(f"kill-{victim}-{seed}")
        with yard.http() as http:
            http.post("/v1/rolloutjobs", json=job).raise_for_status()
        with following(yard, job["metadata"]["name"], ledger):
            for _ in range(2):
                time.sleep(rng.uniform(0.3, 2.5))
                # A kind that has no process this instant (a worker not started yet) is tried again soon.
                for _ in range(50):
                    if yard.kill(victim, rng):
                        killed += 1
                        break
                    time.sleep(0.1)
            finished = wait_finished(yard, job["metadata"]["name"], END)
        whole = Ledger()
        with yard.http() as http:
            read_once(http, job["metadata"]["name"], "", whole)
    finally:
        status = yard.stop()
    assert killed >= 1, "nothing was killed: the run proves nothing"
    assert status in (0, 130)
    assert ledger.faults == []
    assert all(whole.seen.get(key) == record for key, record in ledger.seen.items())
    assert whole.judge(expected) == []
    counts = finished["status"]["counts"]
    assert counts["total"] == len(expected)
    assert counts["succeeded"] + counts["failed"] + counts["cancelled"] == len(expected)
    assert yard.leftovers() == []
