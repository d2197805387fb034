"""The REST client that drivers use: the operator, the Slurm bridge and the local supervisor."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

import httpx
from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.claims import Claim, ClaimList, ClaimStatus
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
from rollyard_crds.task import Task
from rollyard_crds.trajectory import Record
from rollyard_crds.unfinished import UnfinishedJobs
from rollyard_crds.workers import AssignmentOffer, AssignmentOffered, WorkerDeath, WorkerDied

from rollyard_client._async.transport import AsyncTransport
from rollyard_client.call import Call, Retry, segment
from rollyard_client.context import Context
from rollyard_client.paging import Listing
from rollyard_client.requests import jobs, pools

R = TypeVar("R", bound=Record)

CLAIMS: Final = "/v1/claims"
WORKERS: Final = "/v1/workers"
REGISTER_SECONDS: Final = 120.0
"""The seconds beyond the usual timeout that the server may take to read and store the tasks of a job."""


def _parser(record: type[R]) -> Callable[[httpx.Response], R]:
    return lambda answer: record.model_validate_json(answer.content)


class DriverClient:
    """The calls and reports of drivers. All methods can raise RollyardError. `async with` closes it."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = 30.0,
        retry: Retry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._transport = AsyncTransport(
            Context(url.rstrip("/"), token, tls), retry=retry or Retry(), timeout=timeout
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def jobs(self) -> list[RolloutJob]:
        """Return all jobs of all namespaces, without inline tasks."""
        return await self._jobs(None)

    async def unfinished_jobs(self) -> list[RolloutJob]:
        """Return the jobs of all namespaces that have not ended, without inline tasks."""
        return await self._jobs(False)

    async def unfinished(self, revision: int | None = None, wait: float = 0.0) -> UnfinishedJobs:
        """Return which jobs have not ended.

        Args:
            revision: The revision of the last answer. The server answers when the answer differs from that
                one, or after `wait`. With None it answers at once.
            wait: The seconds that the server waits, at most 60.
        """
        return await self._transport.send(jobs.unfinished(revision, wait))

    async def _jobs(self, finished: bool | None) -> list[RolloutJob]:
        pages: Listing[RolloutJob] = Listing(
            lambda after: jobs.jobs(None, after, bare=True, finished=finished)
        )
        items: list[RolloutJob] = []
        while not pages.done:
            items += pages.take(await self._transport.send(pages.next()))
        return items

    async def job(self, namespace: str, name: str) -> RolloutJob:
        """Return one job with its inline tasks, or raise NotFound if it is gone."""
        return await self._transport.send(jobs.job(name, namespace))

    async def register_job(
        self,
        job: RolloutJob,
        tasks: Sequence[Task | Mapping[str, Any]] | None = None,
        skipped: SkippedRows | None = None,
    ) -> RolloutJob:
        """Create a job or update it, and return it with live counts and without inline tasks.

        Args:
            job: The job. Its status is not sent, and of its metadata only the name, the namespace, the labels
                and the annotations are. The annotation `rollyard.dev/object-uid` names its object.
            tasks: The tasks of the ConfigMap `spec.tasks.configMapRef`. The server reads them only if it
                creates the job.
            skipped: The rows of the ConfigMap that were left out.

        Raises:
            Conflict: There is another job with this name (`AlreadyExists`).
            Invalid: A field is refused, or the ConfigMap's tasks are needed and were not given.
        """
        return await self._transport.send(jobs.register_job(job, tasks, skipped, REGISTER_SECONDS))

    async def register_pool(self, pool: BackendPool) -> BackendPool:
        """Create a pool, or update its spec, labels and annotations. Raises the same as `register_job`."""
        return await self._transport.send(pools.register_pool(pool))

    async def delete_job(self, namespace: str, name: str) -> None:
        """Cancel and remove a job, or raise NotFound if it is gone."""
        await self._transport.send(jobs.delete_job(name, namespace))

    async def claims(
        self, revision: int | None = None, wait: float = 0.0, namespace: str | None = None
    ) -> ClaimList:
        """Return the claims, and which sandboxes to keep warm.

        Args:
            revision: The revision of the last answer for this namespace. The server answers when the answer
                differs from that one, or after `wait`. With None it answers at once.
            wait: The seconds that the server waits, at most 60.
            namespace: The namespace whose claims are returned. None selects all namespaces.
        """
        query = {"namespace": namespace, "revision": revision, "wait": wait}
        parse = _parser(ClaimList)
        return await self._transport.send(Call("GET", CLAIMS, parse, query=query, wait=wait))

    async def put_claim_status(self, claim: str, status: ClaimStatus) -> Claim | None:
        """Report a claim as Bound, Failed or Removed, and return its present state, or None after `Removed`.

        A report that comes too late changes nothing, so callers must check the state that is returned.

        Raises:
            NotFound: The claim is gone, and the report is not `Removed`.
        """

        def parse(answer: httpx.Response) -> Claim | None:
            return None if answer.status_code == 204 else Claim.model_validate_json(answer.content)

        path = f"{CLAIMS}/{segment(claim)}/status"
        return await self._transport.send(Call("PUT", path, parse, body=status.model_dump_json().encode()))

    async def worker_died(self, report: WorkerDied) -> WorkerDeath:
        """Report that a stage worker has died, so that its leases are taken back at once."""
        # The call is idempotent: a repeat finds no lease of the worker.
        body = report.model_dump_json().encode()
        return await self._transport.send(Call("POST", f"{WORKERS}/died", _parser(WorkerDeath), body=body))

    async def offer(self, offered: AssignmentOffer) -> AssignmentOffered:
        """Offer a job to a ready worker. Repeating the offer changes nothing.

        Raises:
            NotFound: There is no such job.
            Conflict: The job has ended (`JobEnded`), or the ready worker was offered another job
                (`AlreadyAssigned`).
        """
        body = offered.model_dump_json().encode()
        parse = _parser(AssignmentOffered)
        return await self._transport.send(Call("POST", f"{WORKERS}/offers", parse, body=body))

    async def pools(self) -> list[BackendPool]:
        """Return all pools of all namespaces."""
        return await self._transport.send(pools.pools(None))

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> RolloutJob:
        """Report a job's phase, conditions, observedGeneration and message, and return the job."""
        meta = job.metadata
        return await self._transport.send(jobs.put_job_status(meta.name, meta.namespace, status))

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> BackendPool:
        """Report a pool's conditions, observedGeneration, replicas and selector, and return the pool."""
        meta = pool.metadata
        return await self._transport.send(pools.put_pool_status(meta.name, meta.namespace, status))

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> BackendPool:
        """Report all backends of a pool that is not external, and return the pool."""
        meta = pool.metadata
        return await self._transport.send(pools.put_backends(meta.name, meta.namespace, backends))

    async def cancel(self, job: RolloutJob) -> RolloutJob:
        """Cancel a job and return it."""
        return await self._transport.send(jobs.cancel(job.metadata.name, job.metadata.namespace, {}))

    async def create_pool(self, pool: BackendPool) -> BackendPool:
        """Create a pool and return it. Creating the same pool twice has no further effect."""
        return await self._transport.send(pools.create_pool(pool, pool.metadata.namespace))

    async def delete_pool(self, namespace: str, name: str) -> None:
        """Remove a pool."""
        await self._transport.send(pools.delete_pool(name, namespace))
