"""The bridge where the site keeps accounts (slurmdbd): limits, QOS, and jobs that accounts alone know."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.slurm.bridgelab import Bridge, accounted_for, condition, job, until

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

SLEEPER = "#!/bin/sh\nexec sleep 600\n"


@pytest.fixture(scope="module")
def accounts(slurm_lab: Any) -> Iterator[Any]:
    """Yield the lab with accounts, and two QOS with limits that its user may have."""
    with slurm_lab.accounting():
        known = slurm_lab.sacctmgr("show", "qos", "format=name").split()
        for name, limit in (("one-submitted", "MaxSubmitJobsPerUser=1"), ("one-running", "MaxJobsPerUser=1")):
            if name not in known:
                slurm_lab.sacctmgr("add", "qos", name, limit)
        slurm_lab.sacctmgr("modify", "user", slurm_lab.user, "set", "qos=normal,one-submitted,one-running")
        yield slurm_lab


@pytest.fixture
def bridge(accounts: Any, slurm: Any, shared: Path) -> Iterator[Bridge]:
    made = Bridge(slurm, shared / "h")
    yield made
    made.kill()


@pytest.mark.parametrize(
    ("qos", "says"),
    [("one-submitted", "QOSMaxSubmitJobPerUserLimit"), ("one-running", "QOSMaxJobsPerUserLimit")],
)
def test_a_limit_of_the_site_is_waited_out(slurm: Any, bridge: Bridge, qos: str, says: str) -> None:
    wanted = job("limited", tasks=2, samples=2)
    other = slurm.sbatch(SLEEPER, f"--qos={qos}", "--output=/dev/null")
    slurm.wait_state(other, "RUNNING")
    bridge.options = ["--qos", qos]
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        until(
            lambda: says in condition(client.job("limited"), "Running", "message"), 30, f"{says} to be told"
        )
        found = client.job("limited")
        assert condition(found, "Running") == "False"
        assert condition(found, "Degraded") == "False", "a limit is no failure"
        assert [one["state"] for one in bridge.jobs().values()] in ([], ["PENDING"])
        slurm.run_as_user(["scancel", str(other)])
    bridge.ended("limited")
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0
    assert bridge.jobs() == {}


@pytest.mark.parametrize(("option", "says"), [("--qos", "Invalid qos"), ("--account", "Invalid account")])
def test_what_the_site_does_not_give_is_told(slurm: Any, bridge: Bridge, option: str, says: str) -> None:
    bridge.options = [option, "nosuch"]
    bridge.start()
    with bridge.client() as client:
        client.submit(job("refused"))
        until(lambda: says in condition(client.job("refused"), "Degraded", "message"), 30, "the refusal")
        assert condition(client.job("refused"), "Degraded", "reason") == "WorkersBlocked"
    assert bridge.jobs() == {}
    assert bridge.stop() == 0


def test_accounts_tell_how_a_forgotten_job_ended(slurm: Any, bridge: Bridge) -> None:
    wanted = job("counted", tasks=4, samples=2, pause=4.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    (number,) = bridge.running()
    assert bridge.stop(signal.SIGKILL) == -signal.SIGKILL
    slurm.run_as_user(["scancel", str(number)])

    def forgotten() -> bool:
        shown = subprocess.run(["scontrol", "show", "job", str(number)], env=slurm.env, capture_output=True)
        return b"Invalid job id" in shown.stderr

    # slurmctld purges once a minute.
    until(forgotten, 90, "slurmctld's forgetting")
    bridge.start()
    with bridge.client() as client:
        told = f"Slurm job {number} was cancelled"
        until(
            lambda: told in condition(client.job("counted"), "Degraded", "message"), 30, "what accounts say"
        )
    bridge.ended("counted")
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0
    assert bridge.jobs() == {}
