"""Faults in the middle of a job on a real Slurm with real Apptainer sandboxes, at seeded random times.

Whatever happens, the job ends with every rollout accounted for exactly once, and nothing is left of it on any
node. A ledger that reads the REST API, and the kernel's listings of processes and files, are the judges.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import CROWD, Bridge, accounted_for, condition, job, until
from rollyard_testing.slurm.fulldisk import fill

if TYPE_CHECKING:
    from rollyard_testing.slurm.slurmlab import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.faults, pytest.mark.usefixtures("even_scheduling")]

ROOT = Path(__file__).resolve().parents[2]
SEED = os.environ.get("ROLLYARD_FAULT_SEED", "0")
TASKS = 8
PAUSE_SECONDS = 2.0
WORKERS = 2
ENDED = 10
"""Faults come before this many further rollouts have ended, and those that end in between."""
FURTHER = 1.0
"""The longest time between that and the fault, in seconds."""
END = 120.0
"""The time for a disturbed run to end, in seconds as `until` counts them; an undisturbed one takes about 30.
"""
GONE = 40.0
"""The time for Slurm and the workers to end and remove what is not wanted, in seconds."""
OUTAGE_SECONDS = 30.0
LOOK_SECONDS = 0.4
PROFILE: dict[str, Any] = {
    "workers": {"cpus": 3, "memory": "2000M", "drain_seconds": 5},
    "backends": {"cpus": 1, "memory": "900M"},
}


class Run:
    """The quickstart's first tasks, each with a pause in its setup, on one bridge; with a ledger.

    Args:
        `pause` is in seconds. It decides how many rollouts end while a fault lasts, whatever the machine's
            speed.
    """

    def __init__(self, slurm: Slurm, bridge: Bridge, name: str, samples: int, pause: float) -> None:
        lines = (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()[:TASKS]
        tasks = [json.loads(line) for line in lines]
        for task in tasks:
            task.setdefault("sandbox", {})["setup"] = f"sleep {pause}"
        job: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart/job.yaml").read_text())
        job["metadata"] = {"name": name}
        job["spec"]["tasks"] = {"inline": tasks}
        job["spec"]["samplesPerTask"] = samples
        job["spec"]["sandbox"]["warm"] = 1
        for stage in job["spec"]["stages"].values():
            stage |= {"replicas": WORKERS, "concurrency": 3}
        self.slurm = slurm
        self.bridge = bridge
        self.name = name
        self.job = job
        self.expected = {(task["id"], sample) for task in tasks for sample in range(samples)}
        self.ledger = Ledger()
        self.nodes: set[str] = set()
        """The nodes on which workers were seen."""
        self.before = set(slurm.job_processes())

    @property
    def unfinished(self) -> int:
        """Return the number of rollouts whose end was not yet seen."""
        return len(self.expected) - len(self.ledger.seen)

    def http(self) -> httpx.Client:
        """Return a client of the control plane that runs now."""
        context = json.loads((self.bridge.home / "context.json").read_text())
        token = json.loads((self.bridge.home / "state" / "tokens.json").read_text())["admin"]
        return httpx.Client(
            base_url=context["url"],
            headers={"Authorization": f"Bearer {token}"},
            timeout=patience(60),
            trust_env=False,
        )

    @property
    def url(self) -> str:
        """Return the address of the control plane."""
        return str(json.loads((self.bridge.home / "bridge.json").read_text())["url"])

    def said(self, kind: str, name: str = "") -> str:
        """Return the message of a job's condition; empty where there is none."""
        with self.bridge.client() as client:
            return condition(client.job(name or self.name), kind, "message")

    def reach(self, rng: random.Random) -> None:
        """Wait until some rollouts have ended, and a moment more."""
        ended = rng.randint(1, ENDED)
        self._wait_for(ended)
        time.sleep(rng.uniform(0, FURTHER))
        assert self.unfinished >= 8, "the job ended too soon"

    def further(self, rng: random.Random) -> None:
        """Wait until some more rollouts have ended."""
        ended = len(self.ledger.seen) + rng.randint(1, ENDED)
        self._wait_for(ended)
        assert self.unfinished >= 8, "the job ended too soon"

    def _wait_for(self, ended: int) -> None:
        came = self.ledger.wait_for(ended, patience(CROWD * END))
        assert came, f"only {len(self.ledger.seen)} ended\n{self.words()}"

    def worker(self, rng: random.Random) -> tuple[int, str]:
        """Return a running worker's Slurm job and node."""
        jobs = self.bridge.jobs("stage-worker")
        running = {number: one["node"] for number, one in jobs.items() if one["state"] == "RUNNING"}
        assert running, self.words()
        number = rng.choice(sorted(running))
        return number, running[number]

    def follow(self, done: threading.Event) -> None:
        """Read trajectories into the ledger, and look where workers run, until it is done."""
        while not done.wait(LOOK_SECONDS):
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), self.http() as http:
                self.ledger.read(http, self.name)
            with contextlib.suppress(OSError, ValueError, AssertionError):
                jobs = self.bridge.jobs("stage-worker")
                self.nodes |= {one["node"] for one in jobs.values() if one["state"] == "RUNNING"}

    def wait_finished(self) -> dict[str, Any]:
        """Return the job's status once it is finished."""

        def finished() -> dict[str, Any] | None:
            with contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError), self.http() as http:
                answer = http.get(f"/v1/rolloutjobs/{self.name}").raise_for_status().json()
                status: dict[str, Any] = answer["status"]
                ended = [one for one in status.get("conditions", []) if one["type"] == "Finished"]
                return status if ended and ended[0]["status"] == "True" else None
            return None

        try:
            return dict(until(finished, END, "the job's end"))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.words()}") from None

    def judge(self) -> None:
        """Check that every rollout is once in the ledger, for a second reader and in the counts, and that
        none failed.
        """
        status = self.wait_finished()
        whole = Ledger()
        with self.http() as http:
            whole.read(http, self.name)
            self.ledger.read(http, self.name)
        with invariant():
            assert whole.judge(self.expected) == []
            assert self.ledger.judge(self.expected) == []
            assert self.ledger.seen == whole.seen
        counts = status["counts"]
        assert counts["total"] == counts["succeeded"] == len(self.expected), counts
        assert len(self.nodes) >= WORKERS, f"workers on {self.nodes} only"

    def again(self) -> int:
        """Return the number of rollouts that were begun more than once."""
        return sum(1 for record in self.ledger.seen.values() if record["attempt"])

    def left(self) -> list[str]:
        """Return processes of the user, and files on the nodes, that did not exist before."""
        here = self.slurm.job_processes()
        found = [f"process {pid} {line[:100]}" for pid, line in here.items() if pid not in self.before]
        ours = self.bridge.instance()
        for node, tmp in self.slurm.node_tmp.items():
            # os.walk is used because Path.glob raises where a folder is removed in between.
            for folder, folders, files in os.walk(tmp):
                if ours in folder:
                    # The lock file stays where Slurm killed the batch script before that could remove the
                    # folder. The next worker of this bridge on that node removes it.
                    of_sandbox = {*folders, *files} - {".sweep"} if folder.endswith("/sandboxes") else set()
                    sockets = [name for name in files if name.endswith(".sock")]
                    found += [f"{node} {folder}/{name}" for name in (*of_sandbox, *sockets)]
        return found

    def words(self) -> str:
        """Return the end of every log."""
        logs = [self.bridge.log, *sorted((self.bridge.home / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@contextlib.contextmanager
def a_run(
    slurm: Slurm,
    folder: Path,
    sif: Path,
    name: str,
    samples: int,
    pause: float = PAUSE_SECONDS,
    **workers: Any,
) -> Iterator[Run]:
    """Run a bridge and a job on it, followed while the block runs. Afterwards nothing may be left of them."""
    profile = folder / "profile.yaml"
    profile.write_text(yaml.safe_dump({**PROFILE, "workers": {**PROFILE["workers"], **workers}}))
    options = ["--profile", str(profile), "--sandbox", "apptainer", "--default-image", str(sif)]
    options += ["--engine", "embedded", "--lease-seconds", "5"]
    bridge = Bridge(slurm, folder / "h", options)
    run = Run(slurm, bridge, name, samples, pause)
    done = threading.Event()
    thread = threading.Thread(target=run.follow, args=(done,), name="follow")
    try:
        bridge.start()
        with run.http() as http:
            http.post("/v1/rolloutjobs", json=run.job).raise_for_status()
        thread.start()
        yield run
        # A listing that could not see these would prove nothing by being empty.
        run.judge()
        done.set()
        thread.join(patience(60))
        slurm.heal_nodes()
        assert bridge.stop() == 0, run.words()
        until(lambda: not run.left(), GONE, f"the end of {run.left()}")
    finally:
        done.set()
        if thread.ident is not None:
            thread.join(patience(60))
        bridge.kill()


def test_a_node_whose_slurmd_dies_while_its_processes_run_on(slurm: Slurm, shared: Path, sif: Path) -> None:
    rng = random.Random(f"slurmd-{SEED}")
    with a_run(slurm, shared, sif, "kill-slurmd", samples=12, pause=3.0) as run:
        run.reach(rng)
        number, node = run.worker(rng)
        there = " ".join(slurm.job_processes().values())
        assert "Apptainer instance" in there
        slurm.kill_slurmd(node)
        # Slurm gives the job up, and its own requeue or the bridge begins it elsewhere.
        until(lambda: run.bridge.jobs().get(number, {}).get("node") != node, 90, "Slurm's notice")
        assert run.unfinished >= 8, "the job ended before Slurm's notice"
        old = [line for line in slurm.job_processes().values() if f"-{number} " in f"{line} "]
        assert old, "its processes do not run on"
        print(f"slurmd of {node} killed, noticed with {run.unfinished} to go")
    print(f"{run.again()} rollouts were begun again")


def test_workers_that_are_requeued_cancelled_and_killed(slurm: Slurm, shared: Path, sif: Path) -> None:
    rng = random.Random(f"workers-{SEED}")
    with a_run(slurm, shared, sif, "workers", samples=10) as run:
        run.reach(rng)
        before = set(run.bridge.jobs())
        number, node = run.worker(rng)
        slurm.run_as_user(["scontrol", "requeue", str(number)])
        print(f"job {number} on {node} requeued with {run.unfinished} to go")
        until(lambda: run.bridge.jobs().get(number, {}).get("state") == "PENDING", 60, "the requeue")
        until(lambda: run.bridge.jobs().get(number, {}).get("state") == "RUNNING", 90, "its new start")
        assert set(run.bridge.jobs()) == before, "Slurm's own restart, and no second job beside it"
        assert run.said("Degraded") == "", "which is nothing that is wrong"

        run.further(rng)
        number, node = run.worker(rng)
        slurm.run_as_user(["scancel", str(number)])
        print(f"job {number} on {node} cancelled with {run.unfinished} to go")
        until(lambda: f"Slurm job {number} was cancelled" in run.said("Degraded"), 30, "its being told")
        begun = until(lambda: set(run.bridge.jobs("stage-worker")) - before, 60, "another one")
        assert min(begun) > max(before)
        run.bridge.running(count=WORKERS)

        run.further(rng)
        number, node = run.worker(rng)
        slurm.run_as_user(["scancel", "--full", "--signal=KILL", str(number)])
        print(f"job {number} on {node} killed with {run.unfinished} to go")
        until(lambda: number not in run.bridge.jobs("stage-worker"), 60, "the end of the killed job")
    print(f"{run.again()} rollouts were begun again")


@pytest.mark.nightly
def test_time_limits_in_the_middle_of_rollouts(slurm: Slurm, shared: Path, sif: Path) -> None:
    troubles: set[str] = set()
    with a_run(slurm, shared, sif, "limit", samples=10, pause=6.0, time_limit="1", signal_seconds=15) as run:
        first = set(run.bridge.running(count=WORKERS))

        def over() -> bool:
            troubles.add(run.said("Degraded"))
            return not first & set(run.bridge.jobs("stage-worker"))

        until(over, 150, "the end of the first workers")
        assert run.unfinished >= 8, "the job ended before a time limit"
        print(f"all first workers at their limit with {run.unfinished} to go")
    assert troubles == {""}, "a time limit is nothing that is wrong"
    assert run.again() == 0, "a hand-over is no failure"


@pytest.mark.nightly
def test_a_node_whose_disk_is_full(slurm: Slurm, shared: Path, sif: Path) -> None:
    rng = random.Random(f"disk-{SEED}")
    node = "cn1"
    with (
        slurm.altered_node(node, "--tmp", "64") as small,
        # Each of the two nodes has room for one worker.
        a_run(small, shared, sif, "disk", samples=8, exclude="cn3,cn4") as run,
    ):
        jobs = until(lambda: placed(run, {node, "cn2"}), 60, "a worker on either node")
        run.reach(rng)
        filler = small.node_tmp[node] / "filler"

        def impaired() -> str:
            # It is repeated, because the first may have met a look of the worker's, which takes room for a
            # moment.
            fill(filler)
            with run.bridge.client() as client:
                now = client.job("disk")
            reason, words = (condition(now, "Degraded", part) for part in ("reason", "message"))
            return words if reason == "WorkersImpaired" else ""

        try:
            message = until(impaired, 60, "its being told")
            told, before = time.time(), run.unfinished
            print(f"disk of {node} full with {before} to go")
            assert f"node {node}." in message  # The message also names the Slurm job.
            assert "starts no sandboxes" in message
            assert "No space left on device" in message

            # What has a sandbox there continues to its end, which frees a little; and nothing begins there.
            def others() -> bool:
                late = begun(small, node, told)
                assert not late, f"begun on a full disk: {late}"
                return before - run.unfinished >= 16

            until(others, 120, "the other node's work")
            assert run.unfinished >= 8, "the job ended before there was room again"
        finally:
            filler.unlink()
        freed = time.time()
        until(lambda: begun(small, node, freed), 60, "a new sandbox on the node")
        until(lambda: not run.said("Degraded"), 60, "the end of the trouble")
        # Those that have ended count, too, because the job may be over already.
        after = run.bridge.jobs("stage-worker", states="all")
        assert {number: one["node"] for number, one in after.items()} == jobs, "no worker ended for it"
        assert (run.bridge.home / "troubles").exists()
        until(lambda: not list((run.bridge.home / "troubles").iterdir()), 30, "the end of what was told")
    print(f"{run.again()} rollouts were begun again")


def placed(run: Run, nodes: set[str]) -> dict[int, str]:
    """Return the nodes of the workers' Slurm jobs, once one runs on each of `nodes`; empty until then."""
    jobs = run.bridge.jobs("stage-worker")
    found = {number: one["node"] for number, one in jobs.items() if one["state"] == "RUNNING"}
    return found if set(found.values()) == nodes else {}


def begun(slurm: Slurm, node: str, since: float) -> dict[str, str]:
    """Return states by id of the sandboxes on a node whose start began after `since`, in Unix time."""
    found = {}
    for path in slurm.node_tmp[node].glob("ry-*/*/sandboxes/*/sandbox.json"):
        with contextlib.suppress(FileNotFoundError):  # It was removed just now.
            record = json.loads(path.read_text())
            if record["created"] > since:
                found[record["id"]] = record["state"]
    return found


@pytest.mark.nightly
def test_a_controller_that_is_away_and_a_bridge_that_is_killed(slurm: Slurm, shared: Path, sif: Path) -> None:
    rng = random.Random(f"bridge-{SEED}")
    later = job("later", tasks=2, samples=1)
    with a_run(slurm, shared, sif, "bridge", samples=13, pause=4.0) as run:
        run.reach(rng)
        with run.bridge.client() as client:
            until(lambda: condition(client.job(run.name), "Running") == "True", 30, "its workers being seen")
        slurm.stop_controller()
        try:
            assert slurm.node_states() == {}
            before, ends = run.unfinished, time.monotonic() + OUTAGE_SECONDS
            with run.bridge.client() as client:
                client.submit(later)
                until(lambda: "not submitted yet" in run.said("Running", later.metadata.name), 60)
                time.sleep(max(0.0, ends - time.monotonic()))
                assert condition(client.job(run.name), "Running") == "True", "what runs counts as running"
            until(lambda: run.unfinished < before, 30, "what runs continues without it")
        finally:
            slurm.start_controller()
        until(lambda: "Slurm answers again" in run.bridge.log.read_text(), 60, "its being told")
        assert "Slurm does not answer" in run.bridge.log.read_text()

        run.further(rng)
        jobs, url = set(run.bridge.jobs()), run.url
        run.bridge.kill()
        print(f"bridge killed with {run.unfinished} to go")
        run.bridge.start()
        assert jobs & set(run.bridge.jobs("stage-worker")), "its jobs are found again"
        assert run.url == url, "where its workers look for it"
        assert "Slurm jobs of an earlier run continue" in run.bridge.log.read_text()
        run.bridge.ended(later.metadata.name)
        accounted_for(run.bridge, later)
    assert run.again() == 0, "neither takes work along"
