"""Calls of stage workers and of drivers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

from pydantic import BaseModel
from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
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

from rollyard_client import requests
from rollyard_client.call import Call
from rollyard_client.context import Context
from rollyard_client.paging import Listing
from rollyard_client.transport import AsyncTransport, Retry

M = TypeVar("M", bound=BaseModel)


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

    def __init__(self, url: str, token: str, *, timeout: float = 30.0, retry: Retry | None = None) -> None:
        self._transport = AsyncTransport(
            Context(url.rstrip("/"), token), retry=retry or Retry(), timeout=timeout
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


class DriverClient(_Connected):
    """What drivers ask and report; all methods raise RollyardError."""

    async def jobs(self) -> list[RolloutJob]:
        """All jobs of all namespaces, without inline tasks."""
        pages: Listing[RolloutJob] = Listing(lambda after: requests.jobs(None, after, bare=True))
        found: list[RolloutJob] = []
        while not pages.done:
            found += pages.take(await self._transport.send(pages.next()))
        return found

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
