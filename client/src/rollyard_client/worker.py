"""The REST client that stage workers use."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from pydantic import BaseModel
from rollyard_crds.claims import Claim, ClaimRequest
from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import WorkerJobSpec
from rollyard_crds.workers import Assignment, AssignmentRequest

from rollyard_client.call import Call, Retry
from rollyard_client.context import Context
from rollyard_client.requests import workers
from rollyard_client.transport import AsyncTransport

M = TypeVar("M", bound=BaseModel)


def _lease_call(
    path: str, body: BaseModel | bytes, answer: type[M], *, wait: float = 0.0, again: bool = True
) -> Call[M]:
    return Call(
        "POST",
        f"/v1/leases{path}",
        lambda response: answer.model_validate_json(response.content),
        body=body if isinstance(body, bytes) else body.model_dump_json().encode(),
        wait=wait,
        idempotent=again,
    )


class Connected:
    """The base class of clients with a transport that `async with` closes."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = 30.0,
        retry: Retry | None = None,
        tls: ssl.SSLContext | None = None,
        transport: Callable[..., AsyncTransport] = AsyncTransport,
    ) -> None:
        self._transport = transport(
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


class WorkerClient(Connected):
    """The calls of stage workers. All methods can raise RollyardError.

    `lease` is not sent again once it may have arrived, because no worker would hold the leases that the
    first call granted until they expire. All other calls may be repeated, because the fencing token makes
    a repeat harmless.
    """

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        """Lease up to 64 rollouts. The call waits up to `request.wait` seconds for the first."""
        return await self._transport.send(
            _lease_call("", request, LeaseResponse, wait=request.wait, again=False)
        )

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Renew leases and sandboxes."""
        return await self._transport.send(_lease_call("/heartbeat", request, HeartbeatResponse))

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        """Report the results of stages."""
        return await self._transport.send(_lease_call("/complete", request, OutcomeResponse))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report failures, or give leases back so that another worker can take them."""
        return await self._transport.send(_lease_call("/fail", request, OutcomeResponse))

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Return another backend for a rollout."""
        return await self._transport.send(_lease_call("/route", request, RouteResponse))

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        """Return what the job's reward service says about an episode, which may take `seconds`.

        Raises:
            Conflict: The rollout's Eval lease is not held with this token (`LeaseLost`).
        """
        return await self._transport.send(_lease_call("/reward", request, RewardResponse, wait=seconds))

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> WorkerJobSpec:
        """Return a job's spec without inline tasks.

        Raises:
            NotFound: The job is gone, or it was created again and has another uid.
        """
        return await self._transport.send(workers.job_spec(namespace, name, uid))

    async def waiting_images(self, namespace: str, name: str, uid: str | None = None) -> list[str]:
        """Return the images that the tasks of a job's next rollouts in the queue of Init name, each once.

        Raises:
            NotFound: The job is gone, or it was created again and has another uid.
        """
        return await self._transport.send(workers.waiting_images(namespace, name, uid))

    async def claim(self, request: ClaimRequest) -> Claim:
        """Claim a sandbox. The call waits up to `request.wait` seconds until it is bound or refused.

        A repeated call with the same rollout and token returns the same claim.

        Raises:
            NotFound: There is no such rollout.
            Conflict: The rollout's Init lease is not held with this token (`LeaseLost`).
            TooMany: The limit on open claims is reached.
        """
        return await self._transport.send(workers.file_claim(request))

    async def claim_status(self, claim: str, wait: float = 0.0) -> Claim:
        """Return a claim. The call waits up to `wait` seconds until the claim is not Pending.

        Raises:
            NotFound: The claim is gone.
        """
        return await self._transport.send(workers.claim(claim, wait))

    async def release_claim(self, claim: str) -> None:
        """Release a sandbox. Releasing a claim that is released or gone changes nothing."""
        await self._transport.send(workers.release_claim(claim))

    async def assignment(self, request: AssignmentRequest) -> Assignment | None:
        """Return the assignment of a ready worker, or None if none was offered within `request.wait`.

        Raises:
            Conflict: The assignment was handed out already (`AssignmentTaken`), or its job has ended
                (`AssignmentWithdrawn`).
        """
        return await self._transport.send(workers.assignment(request))
