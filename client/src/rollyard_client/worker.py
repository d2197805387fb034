"""The client of stage workers."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Self, TypeVar

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
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_client import workercalls
from rollyard_client.call import Call
from rollyard_client.context import Context
from rollyard_client.transport import AsyncTransport, Retry

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


def _completed(request: CompleteRequest) -> bytes:
    """The body, with `reward_reason` only where it says something: older control planes do not know it."""
    silent: dict[int, dict[str, Any]] = {}
    for place, result in enumerate(request.results):
        silent[place] = {"trajectory": {"reward_reason"}}
        if not result.reward_reason:
            silent[place]["reward_reason"] = True
    return request.model_dump_json(exclude={"results": silent}).encode()


class Connected:
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


class WorkerClient(Connected):
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
        return await self._transport.send(_lease_call("/complete", _completed(request), OutcomeResponse))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report failures, or hand leases over."""
        return await self._transport.send(_lease_call("/fail", request, OutcomeResponse))

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Another backend for a rollout."""
        return await self._transport.send(_lease_call("/route", request, RouteResponse))

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        """A job's spec, without inline tasks; NotFound when it is gone or was created again."""
        return await self._transport.send(workercalls.job_spec(namespace, name, uid))

    async def claim(self, request: ClaimRequest) -> Claim:
        """Ask for a sandbox; waits up to `request.wait` seconds until it is bound or refused.

        The same rollout and token again is the same claim.

        Raises:
            NotFound: there is no such rollout.
            Conflict: its Init lease is not held with this token (`LeaseLost`).
            TooMany: as many claims stand as may.
        """
        return await self._transport.send(workercalls.file_claim(request))

    async def claim_status(self, claim: str, wait: float = 0.0) -> Claim:
        """A claim; waits up to `wait` seconds until it is not Pending; NotFound once it is gone."""
        return await self._transport.send(workercalls.claim(claim, wait))

    async def release_claim(self, claim: str) -> None:
        """Give a sandbox up; again, or of a claim that is gone, changes nothing."""
        await self._transport.send(workercalls.release_claim(claim))
