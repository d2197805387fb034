"""Workers that stand ready on a real Slurm: a job takes one, and kills between the steps lose nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import Bridge, accounted_for, job, until

pytestmark = pytest.mark.slurm


@pytest.fixture
def bridge(slurm: Any, shared: Path) -> Iterator[Bridge]:
    """Yield a bridge with one ready worker, which has asked for its assignment."""
    profile = shared / "profile.yaml"
    profile.write_text(json.dumps({"workers": {"ready": 1, "drainSeconds": 5}}))
    profile.chmod(0o644)
    made = Bridge(slurm, shared / "h", ["--profile", str(profile)])
    made.start()
    yield made
    made.kill()


def standing(bridge: Bridge, beside: int = 0) -> int:
    """Wait until a ready worker runs that is not this one, and return its Slurm job.

    Its record has a time of its start once the bridge itself has seen it run. A job that came before would
    get a worker of its own.
    """

    def there() -> int:
        standing = [
            one for one in bridge.records().items() if one[1]["workload"]["owner"]["kind"] == "ReadyWorker"
        ]
        ours = [number for number, one in standing if one["started_at"] is not None]
        runs = {number for number, one in bridge.jobs().items() if one["state"] == "RUNNING"}
        return next((number for number in ours if number in runs and number != beside), 0)

    return int(until(there, 60, "a worker that stands ready"))


def process_of(slurm: Any, name: str) -> int:
    """Wait until the process of a ready worker runs, and return its pid."""

    def there() -> int:
        lines = slurm.job_processes()
        return next((pid for pid, line in lines.items() if f"--ready {name} " in line and " -m " in line), 0)

    return int(until(there, 60, "the process of the worker"))


def offers(bridge: Bridge) -> dict[str, bool]:
    """Return whether each offer was taken, by the names of the ready workers."""
    (file,) = (bridge.home / "state").glob("*.db")
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT worker, taken_at FROM assignments").fetchall()
    return {worker: taken is not None for worker, taken in rows}


@pytest.mark.attack(
    "another user reads its token in the script, the comment or the environment",
    boundary="worker",
    surface="ready batch job on Slurm",
    stopped_by="the token is in a file of mode 0600, of which the script has the path; it opens one "
    "assignment",
)
def test_a_job_runs_on_the_worker_that_stood_ready(slurm: Any, bridge: Bridge) -> None:
    killed = standing(bridge)
    slurm.run_as_user(["scancel", str(killed)])
    number = standing(bridge, beside=killed)

    def only_token() -> Path | None:
        """Return the token of the standing worker once that of the killed one is gone."""
        found = [one for one in (bridge.home / "tokens").iterdir() if one.name.endswith(".ready")]
        return found[0] if len(found) == 1 else None

    token = Path(until(only_token, 60, "the end of the killed worker's token"))
    assert str(bridge.records()[number]["workload"]["name"]) in token.name
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text()
    assert secret.startswith("ry-ready.default.ready-")
    shown = slurm.run_as_user(["scontrol", "show", "job", str(number)]).stdout
    script = slurm.run_as_user(["scontrol", "write", "batch_script", str(number), "-"]).stdout
    assert "--ready" in script
    assert [text for text in (secret, secret.rpartition(".")[2]) if text in shown + script] == []

    wanted = job("first", tasks=3, samples=2)
    with bridge.client() as client:
        client.submit(wanted)
    bridge.ended("first")
    accounted_for(bridge, wanted)
    everything = bridge.jobs(states="all")
    assert {one["owner"].split("/")[0] for one in everything.values()} == {"readyworker"}, "no other worker"
    log = (bridge.home / "logs" / f"{everything[number]['workload']}-{number}.log").read_text()
    assert "Traceback" not in log
    until(lambda: number not in bridge.jobs(), 60, "the end of its Slurm job")
    another = standing(bridge, beside=number)
    with bridge.client() as client:
        client.submit(job("second", tasks=2, samples=1))
    bridge.ended("second")
    assert bridge.jobs(states="all")[another]["owner"].startswith("readyworker/")
    assert bridge.stop() == 0
    assert bridge.jobs() == {}
    assert list((bridge.home / "tokens").iterdir()) == []
    queued = subprocess.run(
        ["squeue", "-h"], env=slurm.env, capture_output=True, text=True, timeout=patience(30)
    )
    assert queued.stdout == ""


@pytest.mark.attack(
    "a kill of the bridge, or a restored home, gives one worker to two jobs",
    boundary="worker",
    surface="ready batch job on Slurm",
    stopped_by="one write of its record precedes the offer, and the control plane refuses a second offer",
)
@pytest.mark.nightly
def test_a_bridge_killed_between_the_offer_and_the_assignment(slurm: Any, bridge: Bridge) -> None:
    number = standing(bridge)
    name = str(bridge.records()[number]["workload"]["name"])
    worker = process_of(slurm, name)
    # The worker stands still. The next control plane therefore has no request of it.
    os.kill(worker, signal.SIGSTOP)
    bridge.kill()
    bridge.start()
    assert standing(bridge) == number, "the next bridge finds it and submits no other"
    wanted = job("between", tasks=3, samples=2)
    with bridge.client() as client:
        client.submit(wanted)
    until(lambda: offers(bridge) == {name: False}, 60, "the offer")
    bridge.kill()
    assert bridge.records()[number]["ready"] == name
    os.kill(worker, signal.SIGCONT)
    bridge.start()
    bridge.ended("between")
    accounted_for(bridge, wanted)
    assert offers(bridge) == {name: True}
    everything = bridge.jobs(states="all")
    assert {one["owner"].split("/")[0] for one in everything.values()} == {"readyworker"}, "no other worker"
    assert bridge.stop() == 0
    assert bridge.jobs() == {}
