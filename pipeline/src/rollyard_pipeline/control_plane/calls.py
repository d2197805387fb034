"""The calls that a worker makes to the control plane."""

from __future__ import annotations

from typing import Final, Protocol

from rollyard_crds.backoff import Backoff
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

from rollyard_pipeline.errors import PipelineError


class ControlPlaneUnavailable(PipelineError):
    """There was no answer, a 5xx or a 429. The same request may succeed later."""

    reason = "ControlPlaneUnavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """The wait in seconds that the control plane requested, if it requested one."""


class LeaseCalls(Protocol):
    """The lease calls.

    Each raises ControlPlaneUnavailable, or ControlPlaneRefused if repeating the request cannot help.
    """

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        """Request rollouts to work on. The server waits for some as long as the request says."""
        ...

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Keep leases alive, and return which of them must stop."""
        ...

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        """Report stages that have been completed."""
        ...

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report stages that failed, or that another worker should take."""
        ...

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Request another backend for a rollout whose own backend does not answer."""
        ...

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        """Return what the job's reward service says, which may take `seconds`."""
        ...

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
        """Return the spec of the job that has this uid."""
        ...

    async def waiting_images(self, namespace: str, name: str, uid: str) -> list[str]:
        """Return the images that the tasks of the next rollouts in the queue of Init name, each once."""
        ...


class ClaimCalls(Protocol):
    """The claims of sandboxes that a driver starts elsewhere. They raise the exceptions of `LeaseCalls`.

    A missing object raises `errors.NotThere`.
    """

    async def claim(self, request: ClaimRequest) -> Claim:
        """File a claim, and wait for its sandbox as long as the request says."""
        ...

    async def claim_status(self, claim_id: str, wait: float) -> Claim:
        """Return a claim, after at most `wait` seconds if it has no sandbox yet."""
        ...

    async def release_claim(self, claim_id: str) -> None:
        """Give a claimed sandbox back."""
        ...


TRY_AGAIN: Final = Backoff(first=0.1, longest=5.0, jitter=0.5)
"""The pauses between tries of a call that the control plane does not answer."""
