"""kill -9 of the control plane between Run and the trainer's rewards: nothing is lost or played twice.

The trainer is the loop that docs/rewards.md shows, on a Rollyard of its own with real rollouts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rollyard_testing.faults.yard import ROOT, Yard, a_yard
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("bubblewrap_works", "even_scheduling")]

TASKS = 8
LOOP = ROOT / "examples/trainer/rewards.py"
JOB = "/v1/rolloutjobs/own-rewards"
IN_FLIGHT = 3 * 4
"""The rollouts that dynamic sampling lets play before any of them has a reward."""


def trainer(yard: Yard, tasks: Path) -> str:
    """Run the trainer to its end, and return what it prints."""
    with yard.http() as http:
        address, token = str(http.base_url), http.headers["authorization"].split()[1]
    done = subprocess.run(
        [sys.executable, str(LOOP), str(tasks), "2"],
        env={**os.environ, "ROLLYARD_URL": address, "ROLLYARD_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr + yard.words()
    return done.stdout


def test_rollouts_that_wait_for_rewards_survive_a_kill(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()[:TASKS]
    tasks.write_text("\n".join(lines))
    with a_yard() as yard:
        yard.start()

        def get(path: str, **query: Any) -> list[dict[str, Any]]:
            with yard.http() as http:
                answer = http.get(f"{JOB}/{path}", params=query).raise_for_status()
            return [json.loads(line) for line in answer.content.splitlines()]

        with yard.http() as http:
            manifest = yaml.safe_load(LOOP.with_name("rewards.yaml").read_text())
            http.post("/v1/rolloutjobs", json=manifest).raise_for_status()
            body = {"tasks": [json.loads(line) for line in lines]}
            http.post(f"{JOB}/tasks", json=body).raise_for_status()
            http.post(f"{JOB}/targets", json={"id": "step-1", "groups": 2}).raise_for_status()
        until(lambda: len(get("unscored")) == IN_FLIGHT, what="all in flight wait for rewards")
        before = {record["id"]: record for record in get("unscored")}
        until(lambda: yard.in_use() == [], what="what waits has no sandbox any more")
        assert yard.kill("control-plane", random.Random(0)) is not None

        def is_back() -> bool:
            with contextlib.suppress(httpx.HTTPError), yard.http() as http:
                return http.get("/readyz").status_code == 200
            return False

        until(is_back, what="the control plane starts again")
        with invariant():
            assert {record["id"]: record for record in get("unscored")} == before
        printed = trainer(yard, tasks)
        assert "rewards, " in printed
        ended = {record["id"]: record for record in get("trajectories")}
        with invariant():
            for id, record in before.items():
                assert ended[id]["segments"] == record["segments"], "it was played again"
                assert (ended[id]["reward"] is None) == (ended[id]["status"] != "succeeded")
        groups = get("groups", informative=True)
        assert len(groups) >= 2
        for group in groups:
            for record in group["trajectories"]:
                calls = [call["name"] for turn in record["turns"] for call in turn["tool_calls"]]
                sampled = sum(sum(segment["loss_mask"]) for segment in record["segments"])
                assert record["reward"] == ("submit" in calls) - sampled / 1000
        rewards = [record["reward"] for record in ended.values()]
        trainer(yard, tasks)
        assert [record["reward"] for record in get("trajectories")] == rewards, (
            "a second trainer adds nothing"
        )
