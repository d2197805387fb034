"""Calls of stage workers and of drivers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.claims import Claim, ClaimList, ClaimRequest, ClaimStatus
from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobSpec, RolloutJobStatus
from rollyard_crds.task import Task
from rollyard_crds.unfinished import UnfinishedJobs

from rollyard_client import requests
from rollyard_client.call import Call
from rollyard_client.context import Context
from rollyard_client.paging import Listing
from rollyard_client.transport import AsyncTransport, Retry

M = TypeVar("M", bound=BaseModel)

REGISTER_SECONDS = 120.0
"""Beyond the usual, for the tasks of a job to be read and stored."""


def _lease_call(
    path: str, body: BaseModel, answer: type[M], *, wait: float = 0.0, again: bool = True
) -> Call[M]:
    return Call(
        "POST",
        f"/v1/leases{path}",
        lambda response: answer.model_validate_json(response.content),
        body=body.model_dump_json().encode(),
        wait=wait,
        idempotent=again,
    )


class _Connected:
    """A transport with the lifetime of an `async with`."""

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.close()


class WorkerClient(_Connected):
    """What stage workers ask; all methods raise RollyardError.

    `lease` is not sent again once it may have arrived: what it granted would be held by nobody
    until it expires. All others may be repeated; the fencing token makes that harmless.
    """

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        """Up to 64 rollouts; waits up to `request.wait` seconds for the first."""
        return await self._transport.send(
            _lease_call("", request, LeaseResponse, wait=request.wait, again=False)
        )

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Renew leases and sandboxes."""
        return await self._transport.send(_lease_call("/heartbeat", request, HeartbeatResponse))

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        """Hand in stage results."""
        return await self._transport.send(_lease_call("/complete", request, OutcomeResponse))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report failures, or hand leases over."""
        return await self._transport.send(_lease_call("/fail", request, OutcomeResponse))

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Another backend for a rollout."""
        return await self._transport.send(_lease_call("/route", request, RouteResponse))

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        """A job's spec, without inline tasks; NotFound when it is gone or was made anew."""
        return await self._transport.send(requests.job_spec(namespace, name, uid))

    async def claim(self, request: ClaimRequest) -> Claim:
        """Ask for a sandbox; waits up to `request.wait` seconds until it is bound or refused.

        The same rollout and token again is the same claim.

        Raises:
            NotFound: there is no such rollout.
            Conflict: its Init lease is not held with this token (`LeaseLost`).
            TooMany: as many claims stand as may.
        """
        return await self._transport.send(requests.file_claim(request))

    async def claim_status(self, claim: str, wait: float = 0.0) -> Claim:
        """A claim; waits up to `wait` seconds until it is not Pending; NotFound once it is gone."""
        return await self._transport.send(requests.claim(claim, wait))

    async def release_claim(self, claim: str) -> None:
        """Give a sandbox up; again, or of a claim that is gone, changes nothing."""
        await self._transport.send(requests.release_claim(claim))


class DriverClient(_Connected):
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
