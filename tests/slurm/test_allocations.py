"""Workers as steps of allocations on a real Slurm: quick where nodes are free, and never lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.slurm.bridgelab import Bridge, accounted_for, condition, job, until

pytestmark = [pytest.mark.slurm, pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture
def bridge(slurm: Any, shared: Path) -> Iterator[Bridge]:
    made = Bridge(slurm, shared / "h", ["--start", "salloc"])
    yield made
    made.kill()


def details(slurm: Any, number: int) -> dict[str, str]:
    """What scontrol says of a job that it still knows."""
    said = slurm.run_as_user(["scontrol", "show", "job", str(number)]).stdout
    return dict(re.findall(r"(\w+)=(\S*)", said))


def is_allocation(slurm: Any, number: int) -> bool:
    return details(slurm, number)["BatchFlag"] == "0"


def here(slurm: Any, folder: Path) -> dict[int, str]:
    """The user's processes of salloc and srun for a home, on whatever node."""
    lines = slurm.user_processes().items()
    return {
        pid: line for pid, line in lines if re.match(r"(/\S*/)?(salloc|srun) ", line) and str(folder) in line
    }


def nothing_left(slurm: Any, bridge: Bridge) -> None:
    """No job, no process, no file of an allocation."""
    assert bridge.jobs() == {}
    until(lambda: not here(slurm, bridge.home), 30, "the end of salloc and srun")
    assert {path.name for path in (bridge.home / "allocations").iterdir()} <= {"step.sh"}
    assert not list((bridge.home / "submissions").iterdir())


def test_workers_in_allocations_survive_the_bridge_and_are_replaced(slurm: Any, bridge: Bridge) -> None:
    wanted = job("alloc", tasks=8, samples=3, pause=4.0, workers=2)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    first = bridge.running(count=2)
    assert all(is_allocation(slurm, number) for number in first)
    asked = details(slurm, first[0])
    assert asked["JobName"].startswith("rollyard-alloc-")
    assert (asked["Partition"], asked["NumNodes"]) == ("debug", "1")
    assert "mem=2G" in asked["TRES"]
    bridge.kill()
    assert set(bridge.running(count=2)) == set(first)
    bridge.start()
    with bridge.client() as client:
        until(lambda: client.job("alloc").status.counts.run.active > 0, 60, "a rollout in Run")
        assert set(bridge.running(count=2)) == set(first), "the same allocations"
        slurm.run_as_user(["scancel", str(first[0])])
        until(lambda: "was cancelled" in condition(client.job("alloc"), "Degraded", "message"), 30)
    bridge.ended("alloc")
    accounted_for(bridge, wanted)
    until(lambda: not bridge.jobs(), 60, "the end of the workers")
    ended = details(slurm, first[1])
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), "told, and not cancelled"
    assert bridge.stop() == 0
    nothing_left(slurm, bridge)


def test_an_allocation_whose_salloc_was_killed_is_not_lost(slurm: Any, bridge: Bridge, shared: Path) -> None:
    """Before its step: it ends, and another comes. After: its step works on to the end."""
    programs, once = shared / "bin", shared / "once"
    programs.mkdir(mode=0o755)
    os.chown(programs, slurm.uid, slurm.gid)  # who else could remove what is in it
    (programs / "srun").write_text(
        f'#!/bin/bash\nmkdir {once} 2>/dev/null && {{ kill -KILL "$PPID"; exit 1; }}\n'
        'exec /usr/bin/srun "$@"\n'
    )
    (programs / "srun").chmod(0o755)
    os.chown(shared, slurm.uid, slurm.gid)
    bridge.env = {"PATH": f"{programs}:{slurm.env['PATH']}"}
    wanted = job("lost", tasks=4, samples=1, pause=5.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    until(once.exists, 60, "an allocation")
    bridge.kill()
    (empty,) = bridge.running()
    assert is_allocation(slurm, empty)
    bridge.start()
    until(lambda: empty not in bridge.jobs(), 60, "the end of the allocation without a step")
    (number,) = bridge.running()
    assert is_allocation(slurm, number)
    with bridge.client() as client:
        until(lambda: client.job("lost").status.counts.run.active > 0, 60, "a rollout in Run")
        for pid in here(slurm, bridge.home):
            os.kill(pid, signal.SIGKILL)
        bridge.ended("lost")
        assert condition(client.job("lost"), "Degraded") == "False", "nothing went wrong with the worker"
        assert {one.attempt for one in client.trajectories("lost")} == {0}
    accounted_for(bridge, wanted)
    until(lambda: not bridge.jobs(), 60, "the end of the allocation")
    lowered = details(slurm, number)["TimeLimit"]
    assert lowered in ("00:02:00", "00:03:00"), "Slurm would have ended it too"
    assert bridge.stop() == 0
    nothing_left(slurm, bridge)


def test_where_nothing_is_free_it_is_a_batch_job(slurm: Any, bridge: Bridge) -> None:
    full = slurm.sbatch("#!/bin/sh\nsleep 300\n", "--partition=small", "--exclusive", "--output=/dev/null")
    slurm.wait_state(full, "RUNNING")
    bridge.options = [*bridge.options, "--partition", "small"]
    wanted = job("full", tasks=2, samples=1)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        (number,) = until(bridge.jobs, 60, "a job")
        assert not is_allocation(slurm, number)
        assert bridge.jobs()[number]["state"] == "PENDING"
        until(lambda: "is pending" in condition(client.job("full"), "Running", "message"), 30)
        assert condition(client.job("full"), "Degraded") == "False"
    subprocess.run(["scancel", str(full)], env=slurm.env, check=True, timeout=30)
    bridge.ended("full")
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0
    assert "salloc:" not in bridge.log.read_text(), "nothing is wrong"
    nothing_left(slurm, bridge)
