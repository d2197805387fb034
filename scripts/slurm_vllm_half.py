"""The half of demo-slurm that runs on vLLM as a batch job, which is cancelled in the middle."""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rollyard.connection import connect
from rollyard.quickstart.vllm_servers import run_places
from rollyard_client import Client
from slurm_demo import ROOT, Demo, DemoFailed, Site
from vllm_cpu_build import CPU_ARGUMENTS, CPU_ENVIRONMENT

HF_MODEL = ROOT / "examples" / "tiny-policy" / "hf"
POLL_SECONDS = 0.05
LAB_PROFILE: dict[str, Any] = {
    "time_limit": "30",
    "workers": {"cpus": 3, "memory": "3000M"},
    # The backend has a node to itself.
    "backends": {"cpus": 4, "memory": "3900M"},
}


class VllmHalf(Demo):
    """The quickstart's job over one Slurm job of vLLM, cancelled once a third of the rollouts have ended.

    However long Slurm takes for it, there is work left for another backend: the last tasks are pushed only
    when the pool is seen to have none.
    """

    POOL = "vllm"
    job_name = "quickstart-vllm"
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
        self._told: dict[str, Any] = {}

    def history(self) -> dict[str, Any]:
        """Return what happened to the backend, for the summary."""
        return self._told

    def engine(self) -> list[str]:
        """Return the bridge's options without a pool of its own."""
        return ["--engine", "none"]

    def job(self) -> dict[str, Any]:
        """Return the job over the pool of vLLM."""
        job = super().job()
        job["metadata"]["name"] = self.job_name
        spec = job["spec"]
        spec["backendRef"]["name"] = self.POOL
        spec["tasks"] = {"stream": True}
        # Most of the work still lies ahead when the backend is cancelled.
        run = spec["stages"]["run"]
        run["concurrency"] = run_places(run["concurrency"], self.options.tasks * self.options.samples)
        # Another backend may take longer to start than a worker waits for one.
        run["maxAttempts"] = 5
        return job

    def pool(self) -> dict[str, Any]:
        """Return the pool, as this run has it."""
        engine: dict[str, Any] = {
            "type": "vllm",
            "command": [str(self.python), "-m", "vllm.entrypoints.openai.api_server"],
        }
        if self.options.vllm_gpus and self.site.info is None:
            engine["resources"] = {"gpu": self.options.vllm_gpus}
        else:
            engine |= {"args": list(CPU_ARGUMENTS), "env": dict(CPU_ENVIRONMENT)}
        return {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "BackendPool",
            "metadata": {"name": self.POOL},
            "spec": {"model": str(HF_MODEL), "replicas": 1, "engine": engine},
        }

    def tasks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the tasks that are pushed at once, and the last quarter, which comes later."""
        lines = (self.site.shared / "tasks.jsonl").read_text().splitlines()
        tasks: list[dict[str, Any]] = [json.loads(line) for line in lines]
        late = max(1, len(tasks) // 4) if len(tasks) > 1 else 0
        return tasks[: len(tasks) - late], tasks[len(tasks) - late :]

    def push(self, client: Client, tasks: list[dict[str, Any]]) -> None:
        """Push tasks to the job."""
        client.push_tasks(self.job_name, tasks)
        self.console.print(f"{len(tasks)} tasks were pushed to {self.job_name}.")

    def work(self) -> float:
        """Run the job, cancel its backend in the middle, and return the seconds."""
        home = ("--home", str(self.home))
        self.put("pool.yaml", yaml.safe_dump(self.pool(), sort_keys=False))
        self.rollyard("submit", "-f", str(self.site.shared / "pool.yaml"), *home)
        with connect(None, self.home, "default") as client:
            self._until(lambda: self._ready(client), f"{self.POOL} is not ready")
            self.rollyard("get", "bp", *home)
            first = self._backend(client)
            began = time.monotonic()
            self.rollyard("submit", "-f", str(self.site.shared / "job.yaml"), *home)
            now, later = self.tasks()
            self.push(client, now)
            ended = self._a_third(client)
            self.console.print(f"{ended} rollouts have ended.")
            self.output("scancel", first["slurm_job"])
            cancelled = time.monotonic()
            self._until(lambda: not self._ready(client), f"{self.POOL} is still ready")
            self.push(client, later)
            client.close(self.job_name)
            self.rollyard("get", "bp", *home)
            self._until(lambda: self._ready(client), f"{self.POOL} is not ready again")
            away = time.monotonic() - cancelled
            second = self._backend(client)
        self.rollyard("watch", self.job_name, *home, live=True)
        seconds = time.monotonic() - began
        self.rollyard("describe", "bp", self.POOL, *home)
        self._told = {
            "scancel": {"slurm_job": first["slurm_job"], "rollouts_ended": ended},
            "seconds_without_backend": round(away, 3),
            "backends": [first, second],
        }
        return seconds

    def _until(self, met: Callable[[], bool], wrong: str) -> None:
        deadline = time.monotonic() + self.options.timeout
        while not met():
            if time.monotonic() > deadline:
                raise DemoFailed(f"{wrong} after {self.options.timeout:.0f} s")
            time.sleep(POLL_SECONDS)

    def _ready(self, client: Client) -> bool:
        conditions = client.pool(self.POOL).status.conditions
        return any((one.type, one.status) == ("Ready", "True") for one in conditions)

    def _a_third(self, client: Client) -> int:
        """Wait until a third of the rollouts have ended, and return how many have."""
        total, ended = self.options.tasks * self.options.samples, 0

        def met() -> bool:
            nonlocal ended
            counts = client.job(self.job_name).status.counts
            ended = counts.succeeded + counts.failed + counts.cancelled
            return 3 * ended >= total

        self._until(met, f"a third of the rollouts of {self.job_name} have not ended")
        if ended == total:
            raise DemoFailed(f"all {total} rollouts had ended before the backend was cancelled")
        return ended

    def _backend(self, client: Client) -> dict[str, Any]:
        """Return the pool's one backend, as it is now."""
        text = self.output("squeue", "--me", "-h", "-t", "RUNNING", "-o", "%i|%N|%j", quiet=True)
        jobs = [line.split("|", 2) for line in text.splitlines() if "-backend-" in line]
        urls = [one.url for one in client.pool(self.POOL).status.backends if one.ready]
        if len(jobs) != 1 or len(urls) != 1:
            raise DemoFailed(f"{self.POOL} has the jobs {jobs} and the addresses {urls}, not one of each")
        return {"slurm_job": jobs[0][0], "node": jobs[0][1], "url": urls[0]}


def find_vllm(options: argparse.Namespace, in_lab: bool) -> Path | str:
    """Return the Python with vLLM that the second half runs, or a text that says why there is none."""
    if options.no_vllm:
        return "--no-vllm"
    if options.vllm_python:
        return Path(options.vllm_python)
    if not in_lab:
        return "--vllm-python (or ROLLYARD_VLLM_PYTHON) names a Python with vLLM that the nodes see"
    done = subprocess.run([ROOT / "scripts" / "vllm-env"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DemoFailed("the environment with vLLM cannot be made; see above (--no-vllm: without)")
    return Path(done.stdout.strip())
