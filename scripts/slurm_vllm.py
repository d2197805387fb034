"""The half of demo-slurm that runs on vLLM as a batch job, which is cancelled in the middle."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from demos import ROOT, DemoFailed, wait_until
from rich.console import Console
from rollyard import Client
from rollyard.connection import connect
from slurm_demo import Site, SlurmDemo
from vllm_cpu_build import CPU_ARGUMENTS, CPU_ENVIRONMENT
from vllm_half import JOB, POLL_SECONDS, POOL, VllmPool, lose_backend, use_pool, vllm_environment

HF_MODEL = ROOT / "examples" / "tiny-policy" / "hf"
LAB_PROFILE: dict[str, Any] = {
    "time_limit": "30",
    "workers": {"cpus": 3, "memory": "3000M"},
    # The backend has a node to itself.
    "backends": {"cpus": 4, "memory": "3900M"},
}


class VllmDemo(SlurmDemo):
    """The quickstart's job over one Slurm job of vLLM, cancelled once a third of the rollouts have ended."""

    job_name = JOB
    tokenizer = HF_MODEL
    lab_profile = LAB_PROFILE

    def __init__(self, options: argparse.Namespace, site: Site, console: Console, python: Path) -> None:
        own = copy.copy(options)
        own.out = options.out / "vllm"
        own.out.mkdir(exist_ok=True)
        super().__init__(own, replace(site, shared=site.shared / "vllm"), console)
        self.output("mkdir", "-p", str(self.site.shared), quiet=True)
        self.python = python
        if site.info is not None:
            # One of the lab's nodes is the backend's.
            self.workers = min(self.workers, len(site.info["node_tmp"]) - 1)

    def engine(self) -> list[str]:
        """Return the bridge's options without a pool of its own."""
        return ["--engine", "none"]

    def job(self) -> dict[str, Any]:
        """Return the job over the pool of vLLM."""
        job = super().job()
        use_pool(job, self.options.tasks * self.options.samples)
        job["spec"]["tasks"] = {"stream": True}
        # Another backend may take longer to start than a worker waits for one.
        job["spec"]["stages"]["run"]["maxAttempts"] = 5
        return job

    def work(self) -> float:
        """Run the job, cancel its backend in the middle, and return the seconds."""
        pool = SlurmPool(self)
        pool.start()
        seconds, rollouts_ended, history = lose_backend(pool)
        self.rollyard("describe", "bp", POOL, "--home", str(self.home))
        cancelled = history["backends"][0]["slurm_job"]
        scancel = {"slurm_job": cancelled, "rollouts_ended": rollouts_ended}
        self.history = {"scancel": scancel, **history}
        return seconds


class SlurmPool(VllmPool):
    """A pool of one Slurm job.

    However long Slurm takes for it, there is work left for another backend: the last tasks are pushed only
    when the pool is seen to have none.
    """

    def __init__(self, demo: VllmDemo) -> None:
        self.demo: VllmDemo = demo
        self.home_option = ("--home", str(demo.home))

    def start(self) -> None:
        """Submit the pool, wait until it is ready, and print it."""
        self.demo.put("pool.yaml", yaml.safe_dump(self.manifest(), sort_keys=False))
        self._submit("pool.yaml")
        self.wait_ready()
        self._print()

    def manifest(self) -> dict[str, Any]:
        """Return the pool, as this run has it."""
        options = self.demo.options
        engine: dict[str, Any] = {
            "type": "vllm",
            "command": [str(self.demo.python), "-m", "vllm.entrypoints.openai.api_server"],
        }
        if options.vllm_gpus and self.demo.site.info is None:
            engine["resources"] = {"gpu": options.vllm_gpus}
        else:
            engine |= {"args": list(CPU_ARGUMENTS), "env": dict(CPU_ENVIRONMENT)}
        return {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "BackendPool",
            "metadata": {"name": POOL},
            "spec": {"model": str(HF_MODEL), "replicas": 1, "engine": engine},
        }

    def backend(self) -> dict[str, Any]:
        """Return the pool's one backend, as it is now."""
        command = ("squeue", "--me", "-h", "-t", "RUNNING", "-o", "%i|%N|%j")
        lines = self.demo.output(*command, quiet=True).splitlines()
        jobs = [line.split("|", 2) for line in lines if "-backend-" in line]
        with self.client() as client:
            urls = [backend.url for backend in client.pool(POOL).status.backends if backend.ready]
        if len(jobs) != 1 or len(urls) != 1:
            raise DemoFailed(f"{POOL} has the jobs {jobs} and the addresses {urls}, not one of each")
        return {"slurm_job": jobs[0][0], "node": jobs[0][1], "url": urls[0]}

    @contextmanager
    def killer(self, backend: dict[str, Any]) -> Iterator[Callable[[], None]]:
        """Yield the function that cancels the backend's job."""

        def kill() -> None:
            self.demo.output("scancel", backend["slurm_job"])

        yield kill

    def submit_job(self) -> None:
        """Submit the job over the pool, with all but the last tasks."""
        self._submit("job.yaml")
        self._push(self._tasks()[0])

    def client(self) -> AbstractContextManager[Client]:
        """Return a client of the bridge's control plane."""
        return connect(None, self.demo.home, "default")

    def wait_lost(self) -> None:
        """Wait until the pool is seen to have no backend, and push the last tasks then."""
        self._wait(lambda client: not _is_ready(client), f"{POOL} is still ready")
        self._push(self._tasks()[1])
        with self.client() as client:
            client.close_stream(JOB)
        self._print()

    def wait_ready(self) -> None:
        """Wait until the pool has a backend."""
        self._wait(_is_ready, f"{POOL} is not ready")

    def finish_job(self) -> None:
        """Follow the job to its end."""
        self.demo.rollyard("watch", JOB, *self.home_option, live=True)

    def _tasks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tasks that are pushed at once, and the last quarter, which comes later."""
        lines = (self.demo.site.shared / "tasks.jsonl").read_text().splitlines()
        tasks: list[dict[str, Any]] = [json.loads(line) for line in lines]
        late = max(1, len(tasks) // 4) if len(tasks) > 1 else 0
        return tasks[: len(tasks) - late], tasks[len(tasks) - late :]

    def _push(self, tasks: list[dict[str, Any]]) -> None:
        with self.client() as client:
            client.push_tasks(JOB, tasks)
        self.demo.say(f"{len(tasks)} tasks were pushed to {JOB}.")

    def _wait(self, condition: Callable[[Client], bool], failure: str) -> None:
        with self.client() as client:
            wait_until(lambda: condition(client), failure, self.demo.options.timeout, POLL_SECONDS)

    def _submit(self, name: str) -> None:
        self.demo.rollyard("submit", "-f", str(self.demo.site.shared / name), *self.home_option)

    def _print(self) -> None:
        self.demo.rollyard("get", "bp", *self.home_option)


def _is_ready(client: Client) -> bool:
    conditions = client.pool(POOL).status.conditions
    return any((condition.type, condition.status) == ("Ready", "True") for condition in conditions)


def find_vllm(options: argparse.Namespace, in_lab: bool) -> Path | str:
    """Return the Python with vLLM that the second half runs, or a text that says why there is none."""
    if options.no_vllm:
        return "--no-vllm"
    if options.vllm_python:
        return Path(options.vllm_python)
    if not in_lab:
        return "--vllm-python (or ROLLYARD_VLLM_PYTHON) names a Python with vLLM that the nodes see"
    return vllm_environment()
