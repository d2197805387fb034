"""A Slurm in memory and a control plane's store, for tests of the bridge's driver."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus, RolloutJob, RolloutJobStatus
from rollyard_crds.workers import AssignmentOffer, WorkerDeath, WorkerDied
from rollyard_drivers.loop.driver import Store, StoreTrouble
from rollyard_slurm.errors import SlurmUnavailable, SubmitRefused
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob
from rollyard_slurm.scripts.batch import BatchScript

LIMIT = 3600.0


@dataclass
class FakeSlurm:
    """A Slurm that takes jobs, and starts and forgets them on request."""

    queued: dict[int, QueuedJob] = field(default_factory=dict)
    ended: dict[int, JobDetails] = field(default_factory=dict)
    refuse: str = ""
    """The words of sbatch; with `limit` it is a site's limit."""
    limit: bool = False
    away: str = ""
    unsure: str = ""
    """sbatch hands the job in (`taken`), or not (`lost`), and does not answer."""
    scripts: dict[int, str] = field(default_factory=dict)
    signals: list[tuple[int, str]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    submissions: int = 0
    last: int = 100
    restarts: dict[int, int] = field(default_factory=dict)
    lost_nodes: set[str] = field(default_factory=set)

    async def submit(self, script: BatchScript) -> int:
        self.submissions += 1
        if self.away:
            raise SlurmUnavailable(self.away)
        if self.refuse:
            raise SubmitRefused(self.refuse, self.limit)
        if self.unsure == "lost":
            raise SlurmUnavailable("sbatch did not answer within 20 s", unsure=True)
        job = self.take(script.text())
        if self.unsure == "taken":
            raise SlurmUnavailable("sbatch did not answer within 20 s", unsure=True)
        return job

    def take(self, script: str) -> int:
        """Return a new job of a script."""
        self.last += 1
        comment = re.search(r"^#SBATCH --comment=(\S+)$", script, re.MULTILINE)
        assert comment is not None
        name = SlurmJobIdentity.parse(comment[1])
        assert name is not None
        self.scripts[self.last] = script
        self.queued[self.last] = QueuedJob(
            id=self.last,
            state="PENDING",
            reason="Priority",
            nodes="",
            used=0.0,
            left=LIMIT,
            limit=LIMIT,
            name=f"rollyard-{name.workload}",
            comment=comment[1],
            submitted="start 0",
        )
        return self.last

    async def queue(self) -> list[QueuedJob]:
        if self.away:
            raise SlurmUnavailable(self.away)
        return list(self.queued.values())

    async def details(self, job: int) -> JobDetails | None:
        if self.away:
            raise SlurmUnavailable(self.away)
        if job in self.queued:
            live = self.queued[job]
            return JobDetails(
                job, live.state, live.reason, 0, 0, live.used, live.limit, self.restarts.get(job, 0)
            )
        return self.ended.get(job)

    async def nodes_respond(self, nodes: str) -> bool:
        if self.away:
            raise SlurmUnavailable(self.away)
        return nodes not in self.lost_nodes

    async def signal(self, jobs: Sequence[int], name: str) -> None:
        self.signals += [(job, name) for job in jobs]

    async def cancel(self, jobs: Sequence[int]) -> None:
        self.cancelled += jobs
        for job in jobs:
            if job in self.queued:
                self.end(job, "CANCELLED")

    # What happens in the cluster.

    def change(self, job: int, **changes: Any) -> None:
        self.queued[job] = replace(self.queued[job], **changes)

    def run(self, job: int, left: float = LIMIT) -> None:
        """Let it run, with so many seconds of its hour left."""
        self.change(job, state="RUNNING", reason="None", nodes="cn1", used=LIMIT - left, left=left)

    def run_all(self) -> None:
        for job in self.queued:
            self.run(job)

    def requeue(self, job: int) -> None:
        """Let Slurm take it off its node, and queue it again."""
        self.restarts[job] = self.restarts.get(job, 0) + 1
        again = f"start {self.restarts[job]}"
        self.change(job, state="PENDING", reason="BeginTime", nodes="", used=0.0, submitted=again)

    def end(self, job: int, state: str, status: int = 0, signal: int = 0) -> None:
        gone = self.queued.pop(job)
        restarts = self.restarts.get(job, 0)
        self.ended[job] = JobDetails(job, state, "None", status, signal, gone.used, gone.limit, restarts)


@dataclass
class FakeStore(Store):
    """The jobs and pools that concern the driver."""

    listed: list[RolloutJob] = field(default_factory=list)
    pool_list: list[BackendPool] = field(default_factory=list)
    backends: dict[str, list[BackendStatus]] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    """The names of the workers whose deaths were reported."""
    offers: list[AssignmentOffer] = field(default_factory=list)
    """The offers to ready workers, in the order in which they came."""
    refusal: str = ""
    """The reason for which an offer is refused."""
    away: bool = False
    """Whether offers are not answered."""

    async def jobs(self) -> Sequence[RolloutJob]:
        return [job.model_copy() for job in self.listed]

    async def pools(self) -> Sequence[BackendPool]:
        return [pool.model_copy() for pool in self.pool_list]

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> None:
        for place, one in enumerate(self.listed):
            if one.metadata.name == job.metadata.name:
                self.listed[place] = one.model_copy(update={"status": status})

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> None:
        for place, one in enumerate(self.pool_list):
            if one.metadata.name == pool.metadata.name:
                self.pool_list[place] = one.model_copy(update={"status": status})

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> None:
        self.backends[pool.metadata.name] = list(backends)

    async def cancel(self, job: RolloutJob) -> None:
        """Do nothing, because nothing here cancels."""

    async def worker_died(self, report: WorkerDied) -> WorkerDeath:
        self.deaths.append(report.worker)
        return WorkerDeath(returned=0, completed=False)

    async def offer(self, offered: AssignmentOffer) -> str:
        if self.away:
            raise StoreTrouble("the control plane does not answer")
        self.offers.append(offered)
        return self.refusal

    async def create_pool(self, pool: BackendPool) -> None:
        self.pool_list.append(pool)

    async def delete_pool(self, namespace: str, name: str) -> None:
        self.pool_list = [pool for pool in self.pool_list if pool.metadata.name != name]

    async def watch(self, wake: Callable[[], None]) -> None:
        """Do nothing, because nothing changes by itself."""

    async def close(self) -> None:
        """Do nothing, because nothing is open."""
