"""Faults in the middle of a job on a real cluster, at seeded random times.

Whatever is killed, the job ends with every rollout accounted for exactly once, and nothing is left of it. A
ledger that reads the REST API, the API server's listing of pods, and the node's processes are the judges.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from rollyard_testing.kubernetes.faultproxy import KINDS, FaultProxy
from rollyard_testing.kubernetes.faultrun import STAGES, TASKS, a_run
from rollyard_testing.kubernetes.installed import Release
from rollyard_testing.kubernetes.operatorprocess import OperatorProcess
from rollyard_testing.kubernetes.podwatch import CLAIM, label
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.kubernetes, pytest.mark.faults]

LATER = 7
"""The tasks, of TASKS, that a job gets only when its faults come, the last of them afterwards: no fault hits
a job that has ended, and all that they hit is needed again.
"""
FURTHER = 0.5
"""The longest time between new tasks and the fault, in seconds."""
OUTAGE_SECONDS = 30.0
JOBS = 3
"""The largest number of jobs until each kind of fault has been injected; one is mostly enough."""
SEED = os.environ.get("ROLLYARD_FAULT_SEED", "0")
WANTED = {"stage-worker": len(STAGES), "backend": 1}
"""The pods of each component while a job runs."""


@pytest.mark.parametrize(
    ("component", "hits"),
    [
        ("operator", 2),
        ("stage-worker", 2),
        ("sandbox", 6),
        # Every day these are killed on one machine.
        pytest.param("api", 2, marks=pytest.mark.nightly),
        pytest.param("backend", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_pod_costs_no_rollout(release: Release, component: str, hits: int) -> None:
    rng = random.Random(f"{component}-{SEED}")
    ways = ["kill -9", "delete"] * hits
    with a_run(release, f"kill-{component}") as run:
        began = time.monotonic()
        unfinished = []
        each = (LATER - 1) // hits
        run.feed(TASKS - LATER)
        for number in range(hits):
            run.reach(rng.randint(1, run.fed), 0)
            run.feed(each)
            time.sleep(rng.uniform(0, FURTHER))
            told = run.strike(component, ways[number + rng.randrange(2)], rng)
            left = run.unfinished
            if told and left:
                unfinished.append(left)
            print(f"{time.monotonic() - began:.1f} s: {told}, {left} to go")
        run.feed()
        counts = run.judge()
        print(f"{time.monotonic() - began:.1f} s: {counts}")
        assert len(unfinished) >= 2, "all ended before it was hit"
        if component in ("operator", "api", "stage-worker"):
            # What they held continues elsewhere, and nothing fails because of it.
            assert counts["succeeded"] == len(run.expected)
        again = {key for key, record in run.ledger.seen.items() if record["attempt"]}
        print(f"{len(again)} rollouts were begun again")
        if component in ("operator", "api"):
            assert again == set(), "it takes no work along"
        if component in ("stage-worker", "backend"):
            assert len(run.watch.of(component)) >= WANTED[component] + len(unfinished), "each replaced"


@pytest.mark.nightly
def test_a_cluster_without_api_server_for_a_while(release: Release) -> None:
    rng = random.Random(f"kube-apiserver-{SEED}")
    lab = str(Path(os.environ["ROLLYARD_SHARED"]) / "kit" / "kube-lab")
    with a_run(release, "kill-kube-apiserver") as run:
        run.feed(TASKS - LATER)
        run.reach(rng.randint(1, run.fed), rng.uniform(0, FURTHER))
        run.feed()
        assert run.unfinished >= 8
        try:
            subprocess.run(
                [lab, "kill", "kube-apiserver"], check=True, capture_output=True, timeout=patience(30)
            )
            with pytest.raises((OSError, httpx.HTTPError)):
                run.reader.pods(release.name)
            time.sleep(OUTAGE_SECONDS)
            before = run.unfinished
        finally:
            subprocess.run(
                [lab, "restart", "kube-apiserver"], check=True, capture_output=True, timeout=patience(120)
            )
        print(f"{before} rollouts to go at the end of the outage")
        counts = run.judge()
        assert counts["succeeded"] == len(run.expected)


@pytest.mark.nightly
def test_two_operators_by_mistake_do_no_harm(release: Release) -> None:
    rng = random.Random(f"operators-{SEED}")
    try:
        release.scale_operator(2)
        with a_run(release, "two-operators") as run:
            run.feed(TASKS - LATER)
            run.reach(rng.randint(1, run.fed), rng.uniform(0, FURTHER))
            run.feed()
            assert run.unfinished >= 8
            print(run.strike("operator", "kill -9", rng))
            counts = run.judge(operators=2)
            assert counts["succeeded"] == len(run.expected)
            assert {key for key, record in run.ledger.seen.items() if record["attempt"]} == set()
    finally:
        release.scale_operator(1)


def one_job_all_the_same(release: Release, name: str) -> None:
    """Run a job without faults, whatever its operator is busy with: nothing is done twice."""
    with a_run(release, name) as run:
        run.feed()
        counts = run.judge()
        assert counts["succeeded"] == len(run.expected)
        assert {key for key, record in run.ledger.seen.items() if record["attempt"]} == set()
        assert len(run.watch.of("stage-worker")) == len(STAGES)
        taken = [label(pod, CLAIM) for pod in run.watch.of("sandbox") if label(pod, CLAIM)]
        assert len(taken) == len(set(taken)), "one pod for each claim"


@pytest.mark.nightly
def test_an_api_server_whose_answers_cannot_be_relied_on(release: Release, tmp_path: Path) -> None:
    server, ca_file = release.cluster.server
    release.scale_operator(0)
    try:
        with (
            FaultProxy(server, ca_file, f"answers-{SEED}") as proxy,
            OperatorProcess(release, proxy.url, tmp_path) as operator,
        ):
            for number in range(JOBS):
                one_job_all_the_same(release, f"injected-{number}")
                print(dict(proxy.injected), dict(proxy.calls))
                if set(proxy.injected) == KINDS:
                    break
            assert operator.is_alive(), operator.log()
            # kopf logs how one of its watches failed; nothing else may come as a surprise.
            assert "a pass failed" not in operator.log(), operator.log()
            assert set(proxy.injected) == KINDS, proxy.injected
    finally:
        release.scale_operator(1)
