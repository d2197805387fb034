"""The calls that a worker makes to the control plane, each declared once."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from urllib.parse import quote, urlencode

import orjson
from pydantic import BaseModel
from rollyard_crds.claims import Claim, ClaimRequest
from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    Lease,
    LeaseRequest,
    LeaseResponse,
    OutcomeResponse,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
)
from rollyard_crds.rolloutjob import RolloutJobSpec, WorkerJobSpec
from rollyard_crds.workers import Assignment, AssignmentRequest, WaitingImages
from rollyard_process.backoff import Backoff

from rollyard_pipeline.errors import ControlPlaneRefused, PipelineError

A = TypeVar("A")
M = TypeVar("M", bound=BaseModel)

LEASES: Final = "/v1/leases"
CLAIMS: Final = "/v1/claims"
TRY_AGAIN: Final = Backoff(first=0.1, longest=5.0, jitter=0.5)
"""The pauses between tries of a call that the control plane does not answer."""


class ControlPlaneUnavailable(PipelineError):
    """There was no answer, a 5xx or a 429. The same request may succeed later."""

    reason = "ControlPlaneUnavailable"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """The wait in seconds that the control plane requested, if it requested one."""


@dataclass(frozen=True, slots=True)
class WorkerCall(Generic[A]):
    """One call and how its answer is read.

    Attributes:
        read: Reads the body of an answer, which is empty if the answer has no content. It raises ValueError,
            LookupError or TypeError if the body has another form.
        wait: The seconds beyond the usual timeout that the control plane may take to answer (a long poll).
    """

    method: str
    path: str
    read: Callable[[bytes], A]
    request: BaseModel | None = None
    wait: float = 0.0


class WorkerCalls(ABC):
    """The calls, over whatever `send` does with them.

    A call raises ControlPlaneUnavailable, or ControlPlaneRefused if repeating the request cannot help; of the
    latter, NotThere if the object is missing, and JobEnded if the job of the worker's token is over. None is
    sent a second time here, because the callers know how long their lease is valid.
    """

    @abstractmethod
    async def send(self, call: WorkerCall[A]) -> A:
        """Send a call once and return what its answer says."""

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        """Request up to 64 rollouts to work on. The control plane waits for some as the request says."""
        return await self.send(_post(LEASES, request, LeaseResponse, request.wait))

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        """Keep leases and sandboxes alive, and return which of them must stop."""
        return await self.send(_post(f"{LEASES}/heartbeat", request, HeartbeatResponse))

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        """Report stages that have been completed."""
        return await self.send(_post(f"{LEASES}/complete", request, OutcomeResponse))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        """Report stages that failed, or that another worker should take."""
        return await self.send(_post(f"{LEASES}/fail", request, OutcomeResponse))

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Request another backend for a rollout whose own backend does not answer."""
        return await self.send(_post(f"{LEASES}/route", request, RouteResponse))

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        """Return what the job's reward service says about an episode, which may take `seconds`."""
        return await self.send(_post(f"{LEASES}/reward", request, RewardResponse, seconds))

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        """Return a job's spec without inline tasks. If `uid` is given, the job must have that uid."""
        path = f"{LEASES}/job?{_job_query(namespace, name, uid)}"
        return await self.send(WorkerCall("GET", path, _worker_spec))

    async def plugin(self, namespace: str, name: str, uid: str | None, sha256: str) -> bytes:
        """Return the text of a plugin of a job, as it was when the job was submitted.

        Raises:
            ControlPlaneRefused: The job has no such plugin, or the answer is another text.
        """
        path = f"{LEASES}/plugin?{_job_query(namespace, name, uid)}&sha256={sha256}"
        text = await self.send(WorkerCall("GET", path, bytes))
        if hashlib.sha256(text).hexdigest() != sha256:
            raise ControlPlaneRefused(f"the answer to GET {path} has another SHA-256")
        return text

    async def waiting_images(self, namespace: str, name: str, uid: str) -> list[str]:
        """Return the images that the tasks of the next rollouts in the queue of Init name, each once."""
        path = f"{LEASES}/images?{_job_query(namespace, name, uid)}"
        return (await self.send(WorkerCall("GET", path, WaitingImages.model_validate_json))).images

    async def claim(self, request: ClaimRequest) -> Claim:
        """File a claim for a sandbox that a driver starts, and wait for it as long as the request says.

        A repeated call with the same rollout and token returns the same claim.
        """
        return await self.send(_post(CLAIMS, request, Claim, request.wait))

    async def claim_status(self, claim_id: str, wait: float) -> Claim:
        """Return a claim, after at most `wait` seconds if it has no sandbox yet."""
        path = f"{CLAIMS}/{quote(claim_id, safe='')}?{urlencode({'wait': wait})}"
        return await self.send(WorkerCall("GET", path, Claim.model_validate_json, wait=wait))

    async def release_claim(self, claim_id: str) -> None:
        """Give a claimed sandbox back. Releasing a claim that is released or gone changes nothing."""
        await self.send(WorkerCall("DELETE", f"{CLAIMS}/{quote(claim_id, safe='')}", _nothing))

    async def assignment(self, request: AssignmentRequest) -> Assignment | None:
        """Return the assignment of a ready worker, or None if none was offered within `request.wait`.

        It is handed out once: ControlPlaneRefused is raised if that was before, or if its job has ended.
        """
        return await self.send(
            WorkerCall("POST", "/v1/workers/assignment", _assignment, request, request.wait)
        )


def _post(path: str, request: BaseModel, answer: type[M], wait: float = 0.0) -> WorkerCall[M]:
    return WorkerCall("POST", path, answer.model_validate_json, request, wait)


def _job_query(namespace: str, name: str, uid: str | None) -> str:
    return urlencode({"namespace": namespace, "name": name} | ({"uid": uid} if uid is not None else {}))


def _worker_spec(body: bytes) -> WorkerJobSpec:
    return WorkerJobSpec.model_validate(orjson.loads(body)["spec"])


def _assignment(body: bytes) -> Assignment | None:
    return Assignment.model_validate_json(body) if body else None


def _nothing(body: bytes) -> None:
    """Return None. This reads the answers of calls that have no result."""


async def persistent(call: Callable[[], Awaitable[A]]) -> A:
    """Repeat a call while the control plane cannot be reached. The caller bounds the total time.

    Raises:
        ControlPlaneRefused: The control plane refuses the call.
    """
    tries = 0
    while True:
        try:
            return await call()
        except ControlPlaneUnavailable as error:
            tries += 1
            await asyncio.sleep(TRY_AGAIN.pause(tries, error.retry_after))


class JobSpecs:
    """The specs of the jobs whose rollouts are leased here, by uid, each fetched once.

    The least recently used are dropped beyond `size`.
    """

    def __init__(self, control: WorkerCalls, size: int = 256) -> None:
        self._control = control
        self._size = size
        self._specs: OrderedDict[str, RolloutJobSpec] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, lease: Lease) -> RolloutJobSpec:
        """Return the spec of the lease's job. This waits for the control plane as long as the lease allows.

        Raises:
            ControlPlaneRefused: The control plane refuses to return the spec.
        """
        async with self._lock:
            if lease.job_uid not in self._specs:
                self._specs[lease.job_uid] = await persistent(
                    lambda: self._control.job_spec(lease.namespace, lease.job, lease.job_uid)
                )
                if len(self._specs) > self._size:
                    self._specs.popitem(last=False)
            self._specs.move_to_end(lease.job_uid)
            return self._specs[lease.job_uid]
