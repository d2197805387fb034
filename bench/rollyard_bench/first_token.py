"""From the submission of a job to its first sampled token, on a yard that runs and is idle."""

from __future__ import annotations

import asyncio
import json
import re
import time
from statistics import median
from typing import Any, Final

import httpx
import psutil
import yaml
from rollyard_testing.faults.yard import ROOT, Yard, a_yard
from rollyard_testing.waiting import until

from rollyard_bench.processes import needed
from rollyard_bench.results import Baseline, Measurement, Settings

LOOK_SECONDS: Final = 0.005
REST_SECONDS: Final = 1.0
"""A yard is at rest when its processes have hardly used the processor for this long."""
WAIT_SECONDS: Final = 60.0
JOBS: Final = 3
BUSY: Final = 0.25
"""The share of a core that an idle yard may use: its loops look at the control plane twice a second."""
_TOKENS: Final = re.compile(r"^vllm:generation_tokens_total\S* ([\d.e+]+)", re.MULTILINE)


def quickstart(samples: int) -> dict[str, Any]:
    """Return the quickstart's job with its tasks inline."""
    folder = ROOT / "examples" / "quickstart"
    job: dict[str, Any] = yaml.safe_load((folder / "job.yaml").read_text())
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines() if line.strip()]
    job["spec"] |= {"tasks": {"inline": tasks}, "samplesPerTask": samples}
    return job


def _job(name: str) -> dict[str, Any]:
    job = quickstart(1)
    job["metadata"]["name"] = name
    del job["spec"]["tasks"]["inline"][1:]
    return job


def wait_for_backend(http: httpx.Client) -> dict[str, Any]:
    """Return the first backend of the yard's pool that is ready, once there is one."""

    def ready() -> list[dict[str, Any]]:
        pool = http.get("/v1/backendpools/default").raise_for_status().json()
        return [one for one in pool["status"].get("backends", ()) if one["ready"]]

    backend: dict[str, Any] = until(ready, WAIT_SECONDS, "a ready backend")[0]
    return backend


def _seconds_used(yard: Yard) -> dict[int, float]:
    """Return the CPU seconds of each process of the yard."""
    used = {}
    for process in yard.processes():
        try:
            times = psutil.Process(process.pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[process.pid] = times.user + times.system
    return used


def _at_rest(yard: Yard, ready: int) -> bool:
    """Return whether the ready processes are there and nothing of the yard works any more."""
    kinds = [process.kind for process in yard.processes()]
    if kinds.count("ready") < ready or "worker" in kinds:
        return False
    before = _seconds_used(yard)
    time.sleep(REST_SECONDS)
    after = _seconds_used(yard)
    used = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
    return before.keys() == after.keys() and used < BUSY * REST_SECONDS


def _tokens(engine: httpx.Client) -> float:
    match = _TOKENS.search(engine.get("/metrics").text)
    return float(match[1]) if match else 0.0


def _finished(http: httpx.Client, name: str) -> bool:
    conditions = http.get(f"/v1/rolloutjobs/{name}").raise_for_status().json()["status"]["conditions"]
    return any(one["type"] == "Succeeded" and one["status"] == "True" for one in conditions)


def _play(ready_workers: int) -> list[float]:
    """Return the seconds from each submission to the first token that the engine samples for it."""
    seconds = []
    # A ready control plane and a ready engine stand beside the ready workers.
    processes = ready_workers + 2 if ready_workers else 0
    with a_yard("--ready-workers", str(ready_workers)) as yard:
        yard.start()
        with (
            yard.http() as http,
            httpx.Client(base_url=wait_for_backend(http)["url"], trust_env=False) as engine,
        ):
            for number in range(JOBS):
                until(lambda: _at_rest(yard, processes), WAIT_SECONDS, "the yard's rest")
                name, before = f"first-{number}", _tokens(engine)
                job = _job(name)
                begin = time.perf_counter()
                http.post("/v1/rolloutjobs", json=job).raise_for_status()
                until(lambda sampled=before: _tokens(engine) > sampled, WAIT_SECONDS, "a token", LOOK_SECONDS)
                seconds.append(time.perf_counter() - begin)
                until(lambda name=name: _finished(http, name), WAIT_SECONDS, f"the success of {name}")
        yard.stop()
    return seconds


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the same jobs with a ready worker and without."""
    needed("bwrap", "bubblewrap")
    ready = await asyncio.to_thread(_play, 1)
    without = await asyncio.to_thread(_play, 0)

    def text(times: list[float]) -> str:
        return ", ".join(f"{seconds * 1e3:.0f}" for seconds in times)

    how = (
        f"jobs of one rollout, each after the yard came to rest, until the engine's own counter of sampled "
        f"tokens has grown, looked at every {LOOK_SECONDS * 1e3:.0f} ms; with a ready worker: "
        f"{text(ready)} ms; with --ready-workers 0: {text(without)} ms"
    )
    baseline = Baseline("the same without ready processes", median(without) * 1e3)
    return [Measurement("submit_to_first_token", median(ready) * 1e3, baseline, how)]
