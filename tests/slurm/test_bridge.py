"""The bridge on a real Slurm of four nodes, as an ordinary user: what is submitted, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bridgelab import ROLLYARD, Bridge, accounted_for, condition, job, until
from rollyard_client import Client
from rollyard_crds import BackendPool

pytestmark = [pytest.mark.slurm, pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture
def bridge(slurm: Any, shared: Path) -> Iterator[Bridge]:
    made = Bridge(slurm, shared / "h")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.process.wait(30)


def test_a_job_over_nodes_from_submit_to_nothing_left(slurm: Any, bridge: Bridge, shared: Path) -> None:
    wanted = job("nodes", tasks=6, samples=2, pause=15.0, workers=3)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    jobs = bridge.running(count=3)
    seen = bridge.jobs()
    assert len({seen[number]["node"] for number in jobs}) == 3, "one worker for each node"
    assert {one["owner"] for one in seen.values()} == {"rolloutjob/default/nodes"}
    (token,) = (bridge.home / "tokens").iterdir()
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert token.read_text().startswith("ry-job.default.nodes."), "for this job only"

    second = slurm.run_as_user(bridge.command("up"), check=False)
    assert second.returncode == 1
    assert "another `rollyard slurm-bridge up`" in second.stderr
    assert "stop it with `rollyard slurm-bridge down`" in second.stderr

    told = slurm.run_as_user(bridge.command("status")).stdout
    assert all(str(number) in told for number in jobs)

    bridge.ended("nodes")
    accounted_for(bridge, wanted)
    until(lambda: not bridge.jobs(), 60, "the end of the workers")
    until(lambda: not list((bridge.home / "tokens").iterdir()), 30, "the end of the token")
    assert bridge.stop() == 0
    assert not (bridge.home / "context.json").exists()
    assert not list((bridge.home / "submissions").iterdir())
    ours = [line for line in slurm.user_processes().values() if str(shared) in line]
    assert ours == []


def test_down_ends_its_own_jobs_only(slurm: Any, bridge: Bridge, shared: Path) -> None:
    other = Bridge(slurm, shared / "o")
    try:
        for one in (bridge, other):
            one.start()
            with one.client() as client:
                client.submit(job("long", tasks=2, samples=1, pause=120.0))
        mine, theirs = bridge.running(), other.running()
        assert bridge.process is not None
        bridge.process.kill()
        bridge.process.wait(30)
        assert slurm.state(mine[0]) == "RUNNING"
        told = slurm.run_as_user(bridge.command("down"), timeout=120).stdout
        assert "Slurm jobs ended: 1" in told
        assert bridge.jobs() == {}
        assert slurm.state(theirs[0]) == "RUNNING"
        assert other.stop() == 0
        assert other.jobs() == {}
    finally:
        if other.process is not None and other.process.poll() is None:
            other.process.kill()


def test_a_killed_bridge_finds_its_jobs_again(slurm: Any, bridge: Bridge) -> None:
    wanted = job("again", tasks=6, samples=2, pause=4.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    before = bridge.running()
    url = json.loads((bridge.home / "bridge.json").read_text())["url"]
    assert bridge.process is not None
    bridge.process.kill()
    bridge.process.wait(30)
    time.sleep(5)  # the workers go on meanwhile, and find nobody to tell
    bridge.start()
    assert json.loads((bridge.home / "bridge.json").read_text())["url"] == url
    assert bridge.running() == before, "the same Slurm job goes on"
    bridge.ended("again")
    accounted_for(bridge, wanted)
    assert "1 Slurm jobs of an earlier run go on" in bridge.log.read_text()
    assert bridge.stop() == 0


def test_a_stopped_bridge_leaves_its_jobs(slurm: Any, bridge: Bridge) -> None:
    bridge.start()
    with bridge.client() as client:
        client.submit(job("stays", tasks=2, samples=1, pause=60.0))
    running = bridge.running()
    assert bridge.stop(signal.SIGTERM) == 0
    assert slurm.state(running[0]) == "RUNNING"
    bridge.start()
    assert bridge.running() == running
    assert bridge.stop(signal.SIGINT) == 0
    assert slurm.state(running[0]) != "RUNNING"


def test_a_cancelled_worker_is_started_again(slurm: Any, bridge: Bridge) -> None:
    wanted = job("scancel", tasks=6, samples=2, pause=2.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        (first,) = bridge.running()
        until(lambda: client.job("scancel").status.counts.run.active > 0, 60, "a rollout in Run")
        slurm.run_as_user(["scancel", str(first)])
        until(lambda: "was cancelled" in condition(client.job("scancel"), "Degraded", "message"), 30)
    (second,) = until(lambda: [one for one in bridge.running() if one != first], 60)
    assert second > first
    bridge.ended("scancel")
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0


def test_a_requeued_worker_counts_as_no_failure(slurm: Any, bridge: Bridge) -> None:
    wanted = job("requeue", tasks=6, samples=2, pause=2.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        (number,) = bridge.running()
        until(lambda: client.job("requeue").status.counts.run.active > 0, 60, "a rollout in Run")
        slurm.run_as_user(["scontrol", "requeue", str(number)])
        until(lambda: bridge.jobs()[number]["state"] == "PENDING", 30)
        until(lambda: bridge.jobs().get(number, {}).get("state") == "RUNNING", 90)
    assert list(bridge.jobs()) == [number], "Slurm's own restart, and no second job beside it"
    done = bridge.ended("requeue")
    assert condition(done, "Degraded") == "False"
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0


def test_a_controller_away_is_waited_out(slurm: Any, bridge: Bridge) -> None:
    first, second = job("before", tasks=8, samples=2, pause=12.0), job("during", tasks=2, samples=1)
    bridge.start()
    with bridge.client() as client:
        client.submit(first)
        until(lambda: condition(client.job("before"), "Running") == "True", 60, "a running job")
        slurm.stop_controller()
        try:
            client.submit(second)
            until(lambda: "not submitted yet" in condition(client.job("during"), "Running", "message"), 60)
            time.sleep(15)
            assert condition(client.job("before"), "Running") == "True", "what runs counts as running"
        finally:
            slurm.start_controller()
        bridge.ended("during")
        bridge.ended("before")
    accounted_for(bridge, first)
    accounted_for(bridge, second)
    assert "Slurm does not answer" in bridge.log.read_text()
    assert "Slurm answers again" in bridge.log.read_text()
    assert bridge.stop() == 0


def test_a_command_that_hangs_changes_nothing(slurm: Any, bridge: Bridge, shared: Path) -> None:
    programs, hang = shared / "bin", shared / "hang"
    programs.mkdir(mode=0o755)
    os.chown(programs, slurm.uid, slurm.gid)  # who else could remove what is in it
    for name in ("squeue", "sbatch"):
        path = programs / name
        path.write_text(f'#!/bin/bash\n[ ! -e {hang} ] || sleep 600\nexec /usr/bin/{name} "$@"\n')
        path.chmod(0o755)
    bridge.options = ["--command-timeout", "2"]
    bridge.env = {"PATH": f"{programs}:{slurm.env['PATH']}"}
    first, second = job("hangs", tasks=6, samples=2, pause=10.0), job("later", tasks=2, samples=1)
    bridge.start()
    with bridge.client() as client:
        client.submit(first)
        until(lambda: condition(client.job("hangs"), "Running") == "True", 60, "a running job")
        (number,) = bridge.running()
        hang.touch()
        client.submit(second)
        until(lambda: "did not answer within 2 s" in bridge.log.read_text(), 60, "its being told")
        assert condition(client.job("hangs"), "Running") == "True"
        hang.unlink()
        until(lambda: "Slurm answers again" in bridge.log.read_text(), 60, "its being told")
        bridge.ended("later", 150)
        bridge.ended("hangs")
    accounted_for(bridge, first)
    accounted_for(bridge, second)
    assert slurm.state(number) in ("COMPLETED", "COMPLETING"), "the same worker to the end"
    assert bridge.stop() == 0
    assert not [one for one in slurm.user_processes().values() if "sleep 600" in one]


def test_a_partition_that_does_not_exist_is_told(slurm: Any, bridge: Bridge) -> None:
    bridge.options = ["--partition", "nosuch"]
    bridge.start()
    with bridge.client() as client:
        client.submit(job("nosuch"))
        until(
            lambda: "invalid partition" in condition(client.job("nosuch"), "Running", "message").lower(), 60
        )
        assert condition(client.job("nosuch"), "Degraded", "reason") == "WorkersBlocked"
    assert bridge.stop() == 0


def test_a_request_that_no_node_serves_is_told(slurm: Any, bridge: Bridge, shared: Path) -> None:
    profile = shared / "profile.yaml"
    profile.write_text("workers: {memory: 900G}\n")
    os.chmod(profile, 0o644)
    bridge.options = ["--profile", str(profile)]
    bridge.start()
    with bridge.client() as client:
        client.submit(job("large"))
        said = until(lambda: condition(client.job("large"), "Degraded", "message"), 60)
    assert "emory" in said or "configuration" in said, said
    assert bridge.stop() == 0


def test_a_backend_is_a_job_and_comes_back(slurm: Any, bridge: Bridge) -> None:
    bridge.options = ["--engine", "embedded"]
    bridge.start()
    with bridge.client() as client:

        def ready(beside: str = "") -> BackendPool | None:
            pool = client.pool("default")
            urls = {one.url for one in pool.status.backends if one.ready}
            return pool if condition(pool, "Ready") == "True" and urls - {beside} else None

        first = until(ready, 120, "a ready backend").status.backends[0].url
        (number,) = bridge.jobs("backend")
        slurm.run_as_user(["scancel", str(number)])
        until(lambda: number not in bridge.jobs("backend"), 60)
        until(lambda: ready(first), 120, "another backend")
        # A restart of the bridge: the backend goes on, and is known at once.
        (again,) = bridge.jobs("backend")
        assert bridge.process is not None
        bridge.process.kill()
        bridge.process.wait(30)
    bridge.start()
    with bridge.client() as client:
        until(ready, 30, "the same backend")
        assert list(bridge.jobs("backend")) == [again]
        client.submit(job("served", backendRef={"name": "default"}))
    bridge.ended("served")
    assert bridge.stop() == 0
    assert bridge.jobs() == {}
    queued = subprocess.run(["squeue", "-h"], env=slurm.env, capture_output=True, text=True, timeout=30)
    assert queued.stdout == ""


def test_one_control_plane_for_two_drivers(slurm: Any, bridge: Bridge, shared: Path) -> None:
    home = shared / "local"
    words = [*ROLLYARD, "up", "--home", str(home), "--port", "0", "--sandbox", "process", "--replicas", "0"]
    local = slurm.popen_as_user(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        context = home / "context.json"
        until(context.exists, 90, "the local driver")
        url = json.loads(context.read_text())["url"]
        bridge.options = ["--join", url, "--token-file", str(home / "state" / "tokens.json")]
        bridge.start()
        here, there = job("here"), job("there", placement="slurm")
        tokens = json.loads((home / "state" / "tokens.json").read_text())
        with Client(url, tokens["admin"]) as client:
            client.submit(here)
            client.submit(there)
            for name in ("here", "there"):
                until(lambda name=name: condition(client.job(name), "Succeeded") == "True", 90, name)
        logs = {path.name.partition("-")[0] for path in (bridge.home / "logs").glob("*-worker-*.log")}
        assert logs == {"there"}
        assert bridge.stop() == 0
        assert bridge.jobs() == {}
    finally:
        local.terminate()
        local.wait(60)


def test_a_bridge_on_a_socket_of_its_node(slurm: Any, bridge: Bridge, shared: Path) -> None:
    bridge.options = ["--listen", "unix", "--engine", "embedded"]
    bridge.start()
    assert (bridge.home / "state" / "api.sock").stat().st_mode & 0o777 == 0o600
    known = json.loads((bridge.home / "bridge.json").read_text())
    assert (known["url"].partition("%")[0], known["port"]) == ("http+unix://", 0)
    wanted = job("local", backendRef={"name": "default"})
    with bridge.client() as client:
        client.submit(wanted)
    bridge.ended("local")
    accounted_for(bridge, wanted)
    told = slurm.run_as_user([*ROLLYARD, "get", "--home", str(bridge.home)]).stdout
    assert "local" in told
    assert bridge.stop() == 0
    assert bridge.jobs() == {}


def test_a_time_limit_hands_rollouts_over_to_the_successor(slurm: Any, bridge: Bridge, shared: Path) -> None:
    profile = shared / "profile.yaml"
    profile.write_text("timeLimit: '1'\nsignalSeconds: 5\naheadSeconds: 30\nworkers: {drainSeconds: 3}\n")
    os.chmod(profile, 0o644)
    bridge.options = ["--profile", str(profile)]
    wanted = job("limit", tasks=5, samples=4, pause=15.0)
    bridge.start()
    used: set[int] = set()
    troubles: set[str] = set()
    with bridge.client() as client:
        client.submit(wanted)

        def finished() -> bool:
            found = client.job("limit")
            used.update(bridge.jobs())
            if condition(found, "Degraded") == "True":
                troubles.add(condition(found, "Degraded", "message"))
            return condition(found, "Finished") == "True"

        until(finished, 280, "the end of the job")
        attempts = {one.attempt for one in client.trajectories("limit")}
    accounted_for(bridge, wanted)
    assert len(used) > 1, "a minute was not enough for one Slurm job"
    assert troubles == set(), "a time limit is nothing that is wrong"
    assert attempts == {0}, "a hand-over is no failure"
    assert bridge.stop() == 0
