"""The control plane over REST, with the exceptions that the worker's loops handle."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable
from functools import cached_property
from types import TracebackType
from typing import Final, TypeVar

from rollyard_client import Retry, RollyardError, ServerUnavailable, StorageFull, TooMany, WorkerClient
from rollyard_crds.base import build
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
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.workers import Assignment, AssignmentRequest

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable
from rollyard_pipeline.control_plane.transport import WorkerTransport
from rollyard_pipeline.errors import ControlPlaneRefused, JobEnded, NotThere

T = TypeVar("T")

_IMPORTED_LATE: Final = ("anyio._backends._asyncio", "anyio.streams.tls", "encodings.idna")
"""The modules that the HTTP client imports with its first request."""
_FIRST: Final = (
    LeaseRequest,
    LeaseResponse,
    RolloutJobSpec,
    HeartbeatRequest,
    CompleteRequest,
    OutcomeResponse,
)
"""The models that every worker needs, in the order in which it needs them."""
_TIMEOUT: Final = 30.0  # The limit of a call that does not wait, in seconds.
_START_SECONDS: Final = 60.0  # How long a worker that starts waits for its job, in seconds.


class RestControlPlane:
    """Implements `calls.LeaseCalls` with `rollyard_client.WorkerClient`. It is an async context manager.

    It does not retry. The loops retry themselves, because they know how long their lease is valid.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    @cached_property
    def _client(self) -> WorkerClient:
        return WorkerClient(
            self._url, self._token, timeout=_TIMEOUT, retry=Retry(attempts=1), transport=WorkerTransport
        )

    def prepare(self) -> None:
        """Import and build what the first requests need. Without this call, they take that time themselves.

        It takes 0.1 s of a processor, and may run in a thread until the first request is sent.
        """
        _ = self._client
        for name in _IMPORTED_LATE:
            # They only save time. A module that this installation lacks is not needed by it.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for model in _FIRST:
            build(model)

    async def __aenter__(self) -> RestControlPlane:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if "_client" in self.__dict__:  # A request was sent, or prepared.
            await self._client.aclose()

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        """Request rollouts to work on; see `calls.LeaseCalls`, also for the calls below."""
        return await _translated(lambda: self._client.lease(request))

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Keep leases alive, and return which of them must stop."""
        return await _translated(lambda: self._client.heartbeat(request))

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        """Report stages that have been completed."""
        return await _translated(lambda: self._client.complete(request))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report stages that failed, or that another worker should take."""
        return await _translated(lambda: self._client.fail(request))

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Request another backend for a rollout whose own backend does not answer."""
        return await _translated(lambda: self._client.route(request))

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        """Return what the job's reward service says, which may take `seconds`."""
        return await _translated(lambda: self._client.reward(request, seconds))

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        """Return a job's spec. If `uid` is given, the job of this name must have that uid."""
        return await _translated(lambda: self._client.job_spec(namespace, name, uid))

    async def waiting_images(self, namespace: str, name: str, uid: str) -> list[str]:
        """Return the images that the tasks of the next rollouts in the queue of Init name, each once."""
        return await _translated(lambda: self._client.waiting_images(namespace, name, uid))

    async def claim(self, request: ClaimRequest) -> Claim:
        """File a claim for a sandbox; see `calls.ClaimCalls`, also for the calls below."""
        return await _translated(lambda: self._client.claim(request))

    async def claim_status(self, claim_id: str, wait: float) -> Claim:
        """Return a claim, after at most `wait` seconds if it has no sandbox yet."""
        return await _translated(lambda: self._client.claim_status(claim_id, wait))

    async def release_claim(self, claim_id: str) -> None:
        """Give a claimed sandbox back."""
        await _translated(lambda: self._client.release_claim(claim_id))

    async def assignment(self, request: AssignmentRequest) -> Assignment | None:
        """Return the assignment of a ready worker, or None if no driver has offered one in time."""
        return await _translated(lambda: self._client.assignment(request))

    async def job_when_there(self, namespace: str, name: str) -> RolloutJobSpec:
        """Return the spec of a job by its name, and wait for a control plane that is still starting.

        Raises:
            ControlPlaneRefused: There is no such job, or no control plane answers within a minute.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                tries = 0
                while True:
                    try:
                        return await self.job_spec(namespace, name)
                    except ControlPlaneUnavailable as error:
                        tries += 1
                        await asyncio.sleep(TRY_AGAIN.pause(tries, error.retry_after))
        except TimeoutError as error:
            raise ControlPlaneRefused(
                f"the control plane did not answer within {_START_SECONDS:g} s"
            ) from error


async def _translated(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except (ServerUnavailable, TooMany, StorageFull) as error:
        raise ControlPlaneUnavailable(str(error), error.retry_after) from error
    except RollyardError as error:
        if error.status is not None and error.status >= 500:
            raise ControlPlaneUnavailable(str(error), error.retry_after) from error
        if error.reason == JobEnded.__name__:
            raise JobEnded(str(error)) from error
        kind = NotThere if error.status == 404 else ControlPlaneRefused
        raise kind(str(error)) from error
