"""The client of drivers: the operator, the bridge and the local supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.claims import Claim, ClaimList, ClaimStatus
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
from rollyard_crds.task import Task
from rollyard_crds.unfinished import UnfinishedJobs

from rollyard_client import requests
from rollyard_client.paging import Listing
from rollyard_client.worker import Connected

REGISTER_SECONDS = 120.0
"""Beyond the usual, for the tasks of a job to be read and stored."""


class DriverClient(Connected):
    """What drivers ask and report; all methods raise RollyardError."""

    async def jobs(self) -> list[RolloutJob]:
        """All jobs of all namespaces, without inline tasks."""
        return await self._jobs(None)

    async def unfinished_jobs(self) -> list[RolloutJob]:
        """The jobs of all namespaces that have not ended, without inline tasks."""
        return await self._jobs(False)

    async def unfinished(self, revision: int | None = None, wait: float = 0.0) -> UnfinishedJobs:
        """Which jobs have not ended; with `revision`: once there is another answer, or after `wait`.

        Args:
            revision: of the last answer; None: answer at once.
            wait: seconds, at most 60.
        """
        return await self._transport.send(requests.unfinished(revision, wait))

    async def _jobs(self, finished: bool | None) -> list[RolloutJob]:
        pages: Listing[RolloutJob] = Listing(
            lambda after: requests.jobs(None, after, bare=True, finished=finished)
        )
        found: list[RolloutJob] = []
        while not pages.done:
            found += pages.take(await self._transport.send(pages.next()))
        return found

    async def job(self, namespace: str, name: str) -> RolloutJob:
        """One job, inline tasks included; NotFound when it is gone."""
        return await self._transport.send(requests.job(name, namespace))

    async def register_job(
        self, job: RolloutJob, tasks: Sequence[Task | Mapping[str, Any]] | None = None
    ) -> RolloutJob:
        """Make a job, or bring it up to date; the answer has live counts and no inline tasks.

        Args:
            job: its status is not sent, and of its metadata only name, namespace, labels and annotations;
                the annotation `rollyard.dev/object-uid` names the object that it is.
            tasks: those of the ConfigMap of `spec.tasks.configMapRef`; read only where the job is made.

        Raises:
            Conflict: another job stands under this name (`AlreadyExists`).
            Invalid: a field is refused, or the ConfigMap's tasks are needed and were not given.
        """
        return await self._transport.send(requests.register_job(job, tasks, REGISTER_SECONDS))

    async def register_pool(self, pool: BackendPool) -> BackendPool:
        """Make a pool, or bring its spec, labels and annotations up to date; raises as `register_job`."""
        return await self._transport.send(requests.register_pool(pool))

    async def delete_job(self, namespace: str, name: str) -> None:
        """Cancel and remove a job; NotFound when it is gone."""
        await self._transport.send(requests.delete_job(name, namespace))

    async def claims(
        self, revision: int | None = None, wait: float = 0.0, namespace: str | None = None
    ) -> ClaimList:
        """Claims, and what is to be kept warm; with `revision`: once there is another, or after `wait`.

        Args:
            revision: of the last answer for this namespace; None: answer at once.
            wait: seconds, at most 60.
            namespace: only what belongs to it; None: all.
        """
        return await self._transport.send(requests.claims(namespace, revision, wait))

    async def put_claim_status(self, claim: str, status: ClaimStatus) -> Claim | None:
        """Report a claim as Bound, Failed or Removed; how it stands now, None after `Removed`.

        A report that came too late changes nothing: look at the answer's state.

        Raises:
            NotFound: it is gone, and the report is not `Removed`.
        """
        return await self._transport.send(requests.put_claim_status(claim, status))

    async def pools(self) -> list[BackendPool]:
        """All pools of all namespaces."""
        return await self._transport.send(requests.pools(None))

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> RolloutJob:
        """Report phase, conditions, observedGeneration and message."""
        meta = job.metadata
        return await self._transport.send(requests.put_job_status(meta.name, meta.namespace, status))

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> BackendPool:
        """Report conditions, observedGeneration, replicas and selector."""
        meta = pool.metadata
        return await self._transport.send(requests.put_pool_status(meta.name, meta.namespace, status))

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> BackendPool:
        """Report all backends of a pool that is not external."""
        meta = pool.metadata
        return await self._transport.send(requests.put_backends(meta.name, meta.namespace, backends))

    async def cancel(self, job: RolloutJob) -> RolloutJob:
        """Cancel a job."""
        return await self._transport.send(requests.cancel(job.metadata.name, job.metadata.namespace, {}))

    async def create_pool(self, pool: BackendPool) -> BackendPool:
        """Make a pool; the same one twice is the same as once."""
        return await self._transport.send(requests.create_pool(pool))

    async def delete_pool(self, namespace: str, name: str) -> None:
        """Remove a pool."""
        await self._transport.send(requests.delete_pool(name, namespace))
