"""kill -9 of every part, in the middle of the quickstart, at seeded random times, with several runs each.

The run must still end with every rollout accounted for exactly once and nothing left behind,
judged by a ledger and by listings from outside the product.
"""

from __future__ import annotations

import json
import random
import signal
import time
from typing import Any

import httpx
import pytest
import yaml
from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.faults.yard import LEASE_SECONDS, ROOT, Yard, a_yard, following
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

TASKS = 12
SAMPLES = 4
SEEDS = [0, pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.nightly)]
KILLS = {"control-plane": 2, "worker": 2, "backend": 2, "sandbox": 4}
LATEST = 16
"""The last kill comes when this many rollouts, of 48, have ended, and those that end in between."""
FURTHER = 0.5
"""The longest time between that and the kill, in seconds."""
END = patience(150.0)  # seconds for a killed run to end; an undisturbed one takes about ten

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("bubblewrap_works", "even_scheduling")]


class Run:
    """The quickstart job over its first tasks, in one yard, with a ledger."""

    def __init__(self, yard: Yard, name: str, samples: int = SAMPLES) -> None:
        job: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart/job.yaml").read_text())
        lines = (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()[:TASKS]
        tasks = [json.loads(line) for line in lines]
        job["metadata"] = {"name": name}
        job["spec"]["tasks"] = {"inline": tasks}
        job["spec"]["samplesPerTask"] = samples
        self.yard = yard
        self.name = name
        self.job = job
        self.expected = {(task["id"], sample) for task in tasks for sample in range(samples)}
        self.ledger = Ledger()

    @property
    def unfinished(self) -> int:
        """Return the number of rollouts whose end was not yet seen."""
        return len(self.expected) - len(self.ledger.seen)

    def submit(self) -> None:
        with self.yard.http() as http:
            http.post("/v1/rolloutjobs", json=self.job).raise_for_status()

    def reach(self, ended: int, further: float) -> None:
        """Wait until so many rollouts have ended, or all, and so many seconds more."""
        ended = min(ended, len(self.expected))
        assert self.ledger.wait_for(ended, END), f"only {len(self.ledger.seen)} ended\n{self.yard.words()}"
        time.sleep(further)

    def wait_finished(self) -> dict[str, Any]:
        """Return the job's status once it is finished."""
        deadline = time.monotonic() + END
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            try:
                with self.yard.http() as http:
                    status = http.get(f"/v1/rolloutjobs/{self.name}").raise_for_status().json()["status"]
            except (OSError, KeyError, ValueError, httpx.HTTPError):
                pass  # The control plane is away, which is what this test is about.
            if any(
                one["type"] == "Finished" and one["status"] == "True" for one in status.get("conditions", [])
            ):
                return status
            time.sleep(0.2)
        raise AssertionError(
            f"not finished in {END:.0f} s: {json.dumps(status, indent=1)}\n{self.yard.words()}"
        )

    def judge(self, status: dict[str, Any]) -> None:
        """Check that every rollout ended once, that a second reader gets the same ones, and that no sandbox
        is in use.
        """
        whole = Ledger()
        with self.yard.http() as http:
            whole.read(http, self.name)
            self.ledger.read(http, self.name)
        with invariant():
            assert whole.judge(self.expected) == []
            assert self.ledger.judge(self.expected) == []
            assert self.ledger.seen == whole.seen
        counts = status["counts"]
        assert counts["total"] == len(self.expected)
        for outcome in ("succeeded", "failed", "cancelled"):
            there = sum(record["status"] == outcome for record in whole.seen.values())
            assert counts[outcome] == there, outcome

        # The last kill may have come just before the end, and a busy machine takes a while to end processes.
        deadline = time.monotonic() + patience(LEASE_SECONDS + 3)
        while (used := self.yard.in_use()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert used == [], "sandboxes outlive their rollouts by more than a lease"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("victim", list(KILLS))
def test_every_rollout_is_accounted_for_exactly_once(victim: str, seed: int) -> None:
    rng = random.Random(f"{victim}-{seed}")
    with a_yard() as yard:
        assert yard.listing() == []
        yard.start()
        run = Run(yard, f"kill-{victim}-{seed}")
        run.submit()
        began = time.monotonic()
        hits = []
        with following(yard, run.name, run.ledger):
            for number in range(KILLS[victim]):
                # Between two kills something must end, so what is killed has been at work again.
                further = rng.randint(min(number, 1), LATEST // KILLS[victim])
                run.reach(len(run.ledger.seen) + further, rng.uniform(0.0, FURTHER))
                if run.unfinished == 0:
                    break
                killed = yard.kill(victim, rng)
                print(f"{time.monotonic() - began:.1f} s: kill -9 {killed}, {run.unfinished} to go")
                if killed is not None:
                    hits.append(run.unfinished)
            status = run.wait_finished()
        print(f"{time.monotonic() - began:.1f} s: finished")
        # This is more than can end between a kill and the ledger's last look before it.
        assert max(hits, default=0) >= 8, f"no kill hit the middle of the run: {hits}"
        run.judge(status)
        if victim in ("control-plane", "worker"):
            # What they held continues elsewhere, and nothing fails because of it.
            assert status["counts"]["succeeded"] == len(run.expected)
        if victim == "backend":
            # What was in Run waited for the next one in its place, or returned without using an attempt.
            assert counted_attempts(run) == [], "an outage of the only backend used up an attempt"
        if victim == "control-plane":
            # A worker's sandboxes may go with it, which is one; the control plane takes nothing with it.
            assert {key for key, record in run.ledger.seen.items() if record["attempt"]} == set()
        assert yard.stop() in (0, 130)
        with invariant():
            assert yard.settled_listing() == []


def test_a_pool_that_scales_down_in_the_middle_loses_nothing() -> None:
    """What the ending backend has ends there or continues elsewhere. No rollout begins again."""
    with a_yard("--replicas", "2") as yard:
        yard.start()
        # It is long enough that some are in the middle of Run on both backends while others wait.
        run = Run(yard, "scale-down", samples=2 * SAMPLES)
        with yard.http() as http, following(yard, run.name, run.ledger):

            def backends() -> list[dict[str, Any]]:
                pool = http.get("/v1/backendpools/default").raise_for_status().json()
                found: list[dict[str, Any]] = pool["status"]["backends"]
                return found

            until(lambda: [one["ready"] for one in backends()] == [True, True], END)
            run.submit()
            until(lambda: all(one["activeRollouts"] for one in backends()), END)
            http.patch("/v1/backendpools/default", json={"spec": {"replicas": 1}}).raise_for_status()
            left = run.unfinished
            status = run.wait_finished()
            until(lambda: len(backends()) == 1, END)
        assert left >= 16, "nothing was left to be lost"
        run.judge(status)
        assert status["counts"]["succeeded"] == len(run.expected)
        attempts = {record["attempt"] for record in run.ledger.seen.values()}
        assert attempts == {0}, "a rollout paid for it"
        until(lambda: len([one for one in yard.processes() if one.kind == "backend"]) == 1, END)
        assert yard.stop() in (0, 130)
        with invariant():
            assert yard.settled_listing() == []


def test_a_killed_supervisor_is_followed_by_another_that_ends_the_job() -> None:
    rng = random.Random("supervisor")
    with a_yard() as yard:
        assert yard.listing() == []
        yard.start()
        run = Run(yard, "kill-supervisor")
        run.submit()
        with following(yard, run.name, run.ledger):
            run.reach(rng.randrange(1, LATEST), rng.uniform(0.0, FURTHER))
            assert run.unfinished >= 8
            assert yard.stop(signal.SIGKILL) == -signal.SIGKILL
            yard.start()
            status = run.wait_finished()
        run.judge(status)
        assert yard.stop() in (0, 130)
        with invariant():
            assert yard.settled_listing() == []


def counted_attempts(run: Run) -> list[str]:
    """Return the reasons of the attempts that counted."""
    attempts = [one for record in run.ledger.seen.values() for one in record.get("attempts", ())]
    return [f"{one['stage']}: {one['reason']}" for one in attempts if one["counted"]]


def test_ctrl_c_in_the_middle_leaves_nothing_and_the_next_start_ends_the_job() -> None:
    rng = random.Random("ctrl-c")
    with a_yard() as yard:
        assert yard.listing() == []
        yard.start()
        # Enough are left when it has been stopped: what runs at a Ctrl-C may still end.
        run = Run(yard, "ctrl-c", samples=4 * SAMPLES)
        run.submit()
        with following(yard, run.name, run.ledger):
            run.reach(rng.randrange(1, LATEST), rng.uniform(0.0, FURTHER))
            assert run.unfinished >= 8
            # A listing that could not see these would prove nothing by being empty.
            kinds = {process.kind for process in yard.processes()}
            assert kinds >= {"driver", "control-plane", "backend", "worker", "sandbox"}
            assert any(line.startswith("socket ") for line in yard.listing())
            assert yard.stop(signal.SIGINT) in (0, 130)
            with invariant():
                assert yard.settled_listing() == []
            yard.start()
            assert run.unfinished > 0
            status = run.wait_finished()
        run.judge(status)
        assert counted_attempts(run) == [], "a stop used up attempts, though the workers have drained"
        assert yard.stop() in (0, 130)
        with invariant():
            assert yard.settled_listing() == []
