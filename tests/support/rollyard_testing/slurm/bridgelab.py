"""A bridge of the lab's ordinary user, and methods to see what it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollyard_client import Client
from rollyard_crds import RolloutJob

from rollyard_testing.pace import patience

ROLLYARD = [sys.executable, "-m", "rollyard"]
READY_SECONDS = 90.0
LOOK_SECONDS = 0.25
"""The pause between two looks, most of which start a process."""
CROWD = 4.0
"""How many times as long anything takes as on one node, because all nodes of the lab share the machine."""


def until(condition: Callable[[], Any], seconds: float = 60.0, what: str = "it") -> Any:
    """Return what the condition gives once it is true.

    Args:
        seconds: The time in which it would become true if the node had a usual machine to itself.

    Raises:
        AssertionError: The condition did not become true in time.
    """
    seconds = patience(CROWD * seconds)
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
        time.sleep(LOOK_SECONDS)
    return found


def job(
    name: str,
    tasks: int = 4,
    samples: int = 2,
    pause: float = 0.0,
    workers: int = 1,
    gate: Path | None = None,
    **spec: Any,
) -> RolloutJob:
    """Return a job whose rollouts replay a known solution, each taking `pause` seconds in Run.

    `gate` is a file that each waits for first, up to a minute and a half.
    """
    work = f"sleep {pause}"
    if gate is not None:
        work = f"for _ in $(seq 450); do [ ! -e {gate} ] || break; sleep 0.2; done; {work}"
    listed = [
        {
            "id": f"t{number}",
            "prompt": "say it",
            "test_script": f'[ "$(cat said)" = {number} ]',
            "solution": [{"name": "bash", "arguments": {"command": f"{work}; echo {number} > said"}}],
        }
        for number in range(tasks)
    ]
    stages = {
        "init": {"replicas": workers, "concurrency": 4},
        "run": {"replicas": workers, "concurrency": 4},
        "eval": {"replicas": workers, "concurrency": 4},
    }
    return RolloutJob.model_validate(
        {
            "metadata": {"name": name},
            "spec": {
                "tasks": {"inline": listed},
                "handler": "shell",
                "samplesPerTask": samples,
                "agent": {"type": "oracle", "tools": ["bash"]},
                "stages": stages,
                **spec,
            },
        }
    )


@dataclass
class Bridge:
    """One `rollyard slurm-bridge up` of the ordinary user, on a home in the shared folder."""

    slurm: Any
    home: Path
    options: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    partition: str | None = "debug"
    sandbox: str = "process"
    view: Path | None = None
    """The folder where the home lies for this process, if elsewhere than for its user."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.home.parent / f"{self.home.name}.log"

    def command(self, *words: str) -> list[str]:
        return [*ROLLYARD, "slurm-bridge", *words, "--home", str(self.home)]

    @property
    def files(self) -> Path:
        """Return the home as this process sees it."""
        return self.view or self.home

    def start(self) -> Bridge:
        """Start it, and wait until it is ready."""
        self.begin()
        self.wait_ready()
        return self

    def begin(self) -> None:
        """Start it."""
        words = self.command("up", "--sandbox", self.sandbox)
        words += ["--partition", self.partition] if self.partition else []
        words += self.options
        with self.log.open("ab") as log:
            self.process = self.slurm.popen_as_user(
                words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        """Wait until it is ready."""
        assert self.process is not None
        mine = self.process.pid

        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            return _read(self.files / "bridge.json").get("pid") == mine

        until(ready, READY_SECONDS, "the bridge")

    def stop(self, number: signal.Signals = signal.SIGINT, seconds: float = 240.0) -> int:
        """End it with a signal, and return its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(patience(seconds))

    def kill(self) -> None:
        """End it at once unless it has ended; its Slurm jobs continue."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(patience(30))

    def client(self) -> Client:
        context = _read(self.files / "context.json")
        tokens = _read(self.files / "state" / "tokens.json")
        return Client(context["url"], tokens["admin"])

    def instance(self) -> str:
        return str(_read(self.files / "bridge.json")["instance"])

    def jobs(self, kind: str = "", states: str = "") -> dict[int, dict[str, str]]:
        """Return the Slurm jobs of this home that have not ended: state, node, and what their comments say.

        `states` asks for those of these states instead, as squeue takes them; `all` includes those that
        ended.
        """
        command = ["squeue", "-h", "-o", "%A|%T|%N|%r|%k", *(["-t", states] if states else [])]
        done = subprocess.run(
            command, env=self.slurm.env, capture_output=True, text=True, timeout=patience(60)
        )
        found = {}
        for line in done.stdout.splitlines():
            number, state, node, reason, comment = line.split("|", 4)
            said = dict(part.partition("=")[::2] for part in comment.split(","))
            if said.get("instance") == self.instance() and said.get("kind", "").startswith(kind):
                found[int(number)] = {"state": state, "node": node, "reason": reason, **said}
        return found

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the records of the submissions, by the numbers of their Slurm jobs."""
        found = {}
        for path in (self.files / "submissions").glob("*.json"):
            record = _read(path)
            if record:
                found[record["job"]] = record
        return found

    def running(self, kind: str = "stage-worker", count: int = 1, seconds: float = 60.0) -> list[int]:
        """Wait until so many jobs of a kind run, and return their numbers."""

        def there() -> list[int]:
            found = [number for number, one in self.jobs(kind).items() if one["state"] == "RUNNING"]
            return found if len(found) >= count else []

        return list(until(there, seconds, f"{count} running {kind} jobs"))

    def ended(self, name: str, seconds: float = 120.0) -> RolloutJob:
        """Wait until a job has finished, and return it."""
        with self.client() as client:

            def finished() -> RolloutJob | None:
                found = client.job(name)
                return found if condition(found, "Finished") == "True" else None

            found: RolloutJob = until(finished, seconds, f"the end of {name}")
            return found


def condition(thing: Any, kind: str, part: str = "status") -> str:
    """Return what a condition of a job or pool says; empty if it was never set."""
    return next((str(getattr(one, part)) for one in thing.status.conditions if one.type == kind), "")


def accounted_for(bridge: Bridge, wanted: RolloutJob) -> None:
    """Check that every rollout has exactly one result, and that it is the right one."""
    inline = wanted.spec.tasks.inline or []
    with bridge.client() as client:
        got = list(client.trajectories(wanted.metadata.name))
        counts = client.job(wanted.metadata.name).status.counts
    total = len(inline) * wanted.spec.samples_per_task
    places = Counter((one.task_id, one.sample_index) for one in got)
    assert counts.succeeded == counts.total == total, counts
    assert len(places) == total
    assert set(places.values()) == {1}
    assert {one.reward for one in got} == {1.0}


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return dict(document)
