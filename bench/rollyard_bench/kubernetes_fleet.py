"""150 RolloutJobs and 1,500 stage pods over time on fake nodes: the operator's lag.

The pods are real objects that are really scheduled, and kwok reports them as running. The benchmark leases
and completes the rollouts of Init, Run and Eval through the control plane, as workers do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollyard_crds.lease import CompleteRequest, Lease, LeaseRequest, StageResult
from rollyard_crds.token_arrays import PackedSegment
from rollyard_pipeline.control_plane.rest import RestControlPlane

from rollyard_bench.cluster import FAKE_TAINT, JOB, Cluster, Installation, Object, installation, job_object
from rollyard_bench.leases import stage_result
from rollyard_bench.processes import ProgramFailed, output
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import Sample

FAKE_NODES = 10
NODES = "/api/v1/nodes"
ON_FAKE = {
    "nodeSelector": {"type": "kwok"},
    "tolerations": [{"key": FAKE_TAINT, "operator": "Exists"}],
    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
}
WORKERS = {"init": 3, "run": 3, "eval": 3}
MORE_RUN = 4
"""The number of Run workers after the job's spec has changed.

With the three of each stage these are ten pods in all.
"""
ROLLOUTS = 2
PER_SECOND = 1.0
"""The number of jobs applied per second.

Two slow cores that also run a whole cluster keep up with about that many and their pods. At 1.5 a second they
are fully busy (p99 2.3 s, p50 0.8 s there, 0.4 s and 0.2 s at this rate). At 4 the API server takes a third
of a second for each call, which is its queue and not the operator's.
"""
CHANGE_SECONDS = 3.0
"""The seconds after which the job's spec is changed."""
LIFE_SECONDS = 8.0
"""The seconds after which a job's last stage ends. They are well within a lease."""
LONGEST_SECONDS = 60.0
"""The longest wait for the operator, in seconds."""

Lags = defaultdict[str, list[float]]
"""Lags in milliseconds, by what was waited for."""


@dataclass
class Watched:
    """What the watches reported, and when."""

    pods: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The names of the pods that each job has now and that have not been asked to end."""
    all_pods: int = 0
    most_pods: int = 0
    there: int = 0
    times: dict[tuple[str, str], float] = field(default_factory=dict)
    """The first sight of (job, `pod`), (job, `ten pods`), (job, `finished`), (job, `pods asked to end`).
    """
    news: dict[tuple[str, str], asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))

    def pod(self, at: float, kind: str, pod: Object) -> None:
        """Note a change of a stage worker's pod."""
        meta = pod["metadata"]
        job = meta["labels"][JOB]
        names = self.pods[job]
        self.there += {"ADDED": 1, "DELETED": -1}.get(kind, 0)
        if kind == "DELETED" or meta.get("deletionTimestamp"):
            # The time that a pod then takes to end is up to the fake kubelet.
            names.discard(meta["name"])
            if not names:
                self._note(job, "pods asked to end", at)
        elif kind == "ADDED":
            names.add(meta["name"])
            self.all_pods += 1
            self.most_pods = max(self.most_pods, self.there)
            self._note(job, "pod", at)
            if len(names) == sum(WORKERS.values()) + MORE_RUN - WORKERS["run"]:
                self._note(job, "ten pods", at)

    def job(self, at: float, kind: str, job: Object) -> None:
        """Note a change of a RolloutJob."""
        if kind == "DELETED":
            return
        conditions = (job.get("status") or {}).get("conditions") or ()
        if any((one["type"], one["status"]) == ("Succeeded", "True") for one in conditions):
            self._note(job["metadata"]["name"], "finished", at)

    def _note(self, job: str, what: str, at: float) -> None:
        if (job, what) not in self.times:
            self.times[job, what] = at
            self.news[job, what].set()

    async def since(self, begin: float, job: str, what: str) -> float:
        """Return the milliseconds from `begin` to the first sight of it.

        Raises:
            ProgramFailed: It did not come in time.
        """
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                await self.news[job, what].wait()
        except TimeoutError as error:
            raise ProgramFailed(f"{job}: {what} was not seen within {LONGEST_SECONDS:.0f} s") from error
        return (self.times[job, what] - begin) * 1e3


class Workers:
    """All stage workers in one: Init and Run complete at once, Eval when the job has lived long enough."""

    def __init__(self, client: RestControlPlane, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self.may_end: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._left: dict[str, int] = defaultdict(lambda: ROLLOUTS)
        self.ended: dict[str, float] = {}
        """The time at which the last completion of each job was answered."""
        self.done: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def run(self) -> None:
        """Lease and complete until cancelled."""
        async with asyncio.TaskGroup() as group:
            for stage in ("init", "run", "eval"):
                group.create_task(self._stage(stage, group))

    async def _stage(self, stage: Any, group: asyncio.TaskGroup) -> None:
        request = LeaseRequest(
            worker=f"bench-{stage}",
            node="bench",
            capacity={stage: 64},
            namespace=self._namespace,
            wait=5.0,
        )
        while True:
            leases = (await self._client.lease(request)).leases
            if not leases:
                await asyncio.sleep(0.05)
            elif stage == "eval":
                for lease in leases:
                    group.create_task(self._eval(lease))
            else:
                await self._complete([_result(lease) for lease in leases], stage)

    async def _complete(self, results: list[StageResult], stage: str) -> None:
        await self._client.complete(CompleteRequest(worker=f"bench-{stage}", results=results))

    async def _eval(self, lease: Lease) -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            await self.may_end[lease.job].wait()
        await self._complete([_result(lease)], "eval")
        self._left[lease.job] -= 1
        if not self._left[lease.job]:
            self.ended[lease.job] = time.perf_counter()
            self.done[lease.job].set()


def _result(lease: Lease) -> StageResult:
    segment = PackedSegment.of([1], [2], [1], [-0.1], ["v1"]).model_dump(mode="json")
    return StageResult.model_validate(stage_result(lease.model_dump(mode="json"), segment))


async def _play(name: str, installed: Installation, watched: Watched, workers: Workers, lags: Lags) -> None:
    """Play one job's life. Its object is deleted at the end."""
    stages: Object = {stage: {"replicas": count, "template": ON_FAKE} for stage, count in WORKERS.items()}
    path = f"{installed.jobs}/{name}"
    begin = time.perf_counter()
    await installed.cluster.create(installed.jobs, job_object(name, ROLLOUTS, stages=stages))
    lags["applied to first pod"].append(await watched.since(begin, name, "pod"))
    await asyncio.sleep(max(0.0, begin + CHANGE_SECONDS - time.perf_counter()))
    changed = time.perf_counter()
    await installed.cluster.merge(path, {"spec": {"stages": {"run": {"replicas": MORE_RUN}}}})
    lags["spec changed to further pod"].append(await watched.since(changed, name, "ten pods"))
    await asyncio.sleep(max(0.0, begin + LIFE_SECONDS - time.perf_counter()))
    workers.may_end[name].set()
    async with asyncio.timeout(LONGEST_SECONDS):
        await workers.done[name].wait()
    ended = workers.ended[name]
    lags["last result to Succeeded"].append(await watched.since(ended, name, "finished"))
    ending = await watched.since(ended, name, "pods asked to end")
    lags["last result to all pods asked to end"].append(ending)
    await installed.cluster.delete(path)


@asynccontextmanager
async def fake_nodes(cluster: Cluster, count: int) -> AsyncIterator[None]:
    """Add nodes without machines. Those that did not exist before are removed at the end."""
    listed = await cluster.get(NODES, labelSelector="type=kwok")
    before = {node["metadata"]["name"] for node in listed["items"]}
    if len(before) < count:
        await output(str(cluster.lab), "fake", str(count), seconds=60)
    try:
        yield
    finally:
        for number in range(1, count + 1):
            if (name := f"fake-{number}") not in before:
                await cluster.delete(f"{NODES}/{name}")


async def _measure(installed: Installation, settings: Settings) -> list[Measurement]:
    jobs = 50 if settings.quick else 150
    watched = Watched()
    lags: Lags = defaultdict(list)
    begin = time.perf_counter()
    async with (
        installed.cluster.watching(installed.pods, watched.pod, installed.selector, whole=False),
        installed.cluster.watching(installed.jobs, watched.job),
        installed.worker() as client,
    ):
        workers = Workers(client, installed.namespace)
        async with asyncio.TaskGroup() as beside:
            standing = beside.create_task(workers.run())
            async with asyncio.TaskGroup() as group:
                for number in range(jobs):
                    await asyncio.sleep(max(0.0, begin + number / PER_SECOND - time.perf_counter()))
                    installed.check()
                    group.create_task(_play(f"job-{number}", installed, watched, workers, lags))
            standing.cancel()
    seconds = time.perf_counter() - begin
    lag = Sample(tuple(value for values in lags.values() for value in values))
    each = "; ".join(f"{what}: {Sample(tuple(values)).text()}" for what, values in lags.items())
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    how = (
        f"{jobs:,} RolloutJobs applied, {PER_SECOND:g} a second, of {sum(WORKERS.values())} stage pods each "
        f"and one more after a change of its spec, {watched.all_pods:,} pods in all, at most "
        f"{watched.most_pods} at once, on {FAKE_NODES} fake nodes, each job over after "
        f"{LIFE_SECONDS:g} s; {seconds:.0f} s; {load}; from the change of an object (or the last result's "
        f"acceptance by the control plane) to the operator's answer in a watch: {lag.text()}; {each}"
    )
    baseline = Baseline("p50 of the same", lag.p50 / 1e3)
    return [Measurement("reconcile_lag_p99", lag.p99 / 1e3, baseline, how)]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure everything in a new namespace."""
    async with installation() as installed, fake_nodes(installed.cluster, FAKE_NODES):
        return await _measure(installed, settings)
