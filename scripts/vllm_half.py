"""The half of a demo that runs on vLLM, whose one backend is killed in the middle."""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from demos import ROOT, Demo, DemoFailed, wait_until
from rollyard import Client
from rollyard.errors import NotFound as NoSuchJob
from rollyard.quickstart.vllm_servers import run_places

POOL = "vllm"
JOB = "quickstart-vllm"
POLL_SECONDS = 0.05


class VllmPool(ABC):
    """A pool of one vLLM and the job over it, on one kind of cluster."""

    demo: Demo

    @abstractmethod
    def backend(self) -> dict[str, Any]:
        """Return the pool's one backend, as it is now: its `url`, and what identifies it on the cluster."""

    @abstractmethod
    def killer(self, backend: dict[str, Any]) -> AbstractContextManager[Callable[[], None]]:
        """Yield the function that prints how the backend is killed, and kills it at once."""

    @abstractmethod
    def submit_job(self) -> None:
        """Submit the job over the pool."""

    @abstractmethod
    def client(self) -> AbstractContextManager[Client]:
        """Yield a client of the control plane."""

    @abstractmethod
    def wait_lost(self) -> None:
        """Wait until the pool is seen to have no backend, and do what the demo does meanwhile."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the pool has a backend."""

    @abstractmethod
    def finish_job(self) -> None:
        """Wait for the job, which must succeed."""


class BackendLoss(NamedTuple):
    """What happened in a job whose backend was killed."""

    seconds: float
    """The wall time of the job."""
    rollouts_ended: int
    """The number of rollouts that had ended before."""
    history: dict[str, Any]
    """The fields of the summary that are the same on all clusters; `backends` has the killed one first."""


def lose_backend(pool: VllmPool) -> BackendLoss:
    """Run the job over a ready pool, whose one backend is killed once a third of the rollouts have ended."""
    first = pool.backend()
    with pool.killer(first) as kill:
        began = time.monotonic()
        pool.submit_job()
        rollouts_ended = wait_for_a_third(pool)
        pool.demo.say(f"{rollouts_ended} rollouts have ended.")
        killed = time.monotonic()
        kill()
    pool.wait_lost()
    pool.wait_ready()
    away = time.monotonic() - killed
    history = {"seconds_without_backend": round(away, 3), "backends": [first, pool.backend()]}
    pool.finish_job()
    return BackendLoss(time.monotonic() - began, rollouts_ended, history)


def wait_for_a_third(pool: VllmPool) -> int:
    """Wait until a third of the rollouts have ended, and return how many have.

    Raises:
        DemoFailed: They have not ended in time, or all rollouts have.
    """
    options = pool.demo.options
    total, ended = options.tasks * options.samples, 0

    def a_third_has_ended() -> bool:
        nonlocal ended
        try:
            counts = client.job(JOB).status.counts
        except NoSuchJob:  # The operator has not seen it yet.
            return False
        ended = counts.succeeded + counts.failed + counts.cancelled
        return 3 * ended >= total

    with pool.client() as client:
        failure = f"a third of the rollouts of {JOB} have not ended"
        wait_until(a_third_has_ended, failure, options.timeout, POLL_SECONDS)
    if ended == total:
        raise DemoFailed(f"all {total} rollouts had ended before the backend was killed")
    return ended


def use_pool(job: dict[str, Any], rollouts: int) -> None:
    """Make a manifest of the quickstart's job the one over the pool of vLLM, under a name of its own."""
    job["metadata"]["name"] = JOB
    spec = job["spec"]
    spec["backendRef"]["name"] = POOL
    # Most of the work still lies ahead when the backend is killed.
    run = spec["stages"]["run"]
    run["concurrency"] = run_places(run["concurrency"], rollouts)


def vllm_environment() -> Path:
    """Return the Python of scripts/vllm-env, which makes the environment if there is none."""
    done = subprocess.run([ROOT / "scripts" / "vllm-env"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DemoFailed("the environment with vLLM cannot be made; see above (--no-vllm: without)")
    return Path(done.stdout.strip())
