"""A harness plays a rollout in a pod without network, through the gateway of a Run worker in another pod."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.harnesses import asked_once, bash_harness
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installed import Release

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

SECONDS = patience(180.0)


def test_a_harness_plays_a_rollout(release: Release) -> None:
    job = release.job("own-agent", 1)
    job["spec"]["tasks"] = {"inline": [{"id": "a", "prompt": "Count the lines.", "test_script": "true"}]}
    job["spec"]["agent"] = bash_harness()
    release.apply(job)
    ledger, deadline = Ledger(), time.monotonic() + SECONDS
    try:
        with release.http() as http:
            while not ledger.seen:
                assert time.monotonic() < deadline, release.words()
                time.sleep(0.5)
                if http.get("/v1/rolloutjobs/own-agent").status_code == 200:
                    ledger.read(http, "own-agent")
    finally:
        release.kubectl("delete", "rj", "own-agent", f"--timeout={SECONDS:.0f}s")
    assert ledger.judge({("a", 0)}) == []
    (one,) = ledger.seen.values()
    asked_once(one)
    assert one["reward"] == 1.0
