"""Sandboxes that a driver starts elsewhere: claims that the control plane holds, reached over TCP.

The worker itself starts nothing and holds no credentials of a cluster. A claim belongs to a rollout and to
the fencing token of its Init or Eval lease, so filing it again returns the same sandbox. The control plane
releases claims that no rollout needs any more by itself, and a release from here only makes that happen
sooner.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from rollyard_crds.claims import Claim, ClaimRequest, SandboxShape
from rollyard_crds.lease import LeaseRef, SandboxHandle
from rollyard_crds.names import NODE, PROVIDER
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError
from rollyard_sandbox.errors import SandboxError as ExecError
from rollyard_sandbox.proof import PROVEN
from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE

from rollyard_pipeline.control_plane.calls import WorkerCalls, persistent
from rollyard_pipeline.errors import ControlPlaneRefused, NotThere
from rollyard_pipeline.sabotage import CRASHED, OUT_OF_MEMORY
from rollyard_pipeline.sandboxes.connection import apply, connect
from rollyard_pipeline.sandboxes.errors import (
    ImageNotUsable,
    SandboxImpossible,
    SandboxLost,
    SandboxProviderError,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxKey, SandboxProvider, SandboxRequest
from rollyard_pipeline.sandboxes.starters.root_folders import WORKDIR

log = logging.getLogger(__name__)

OWN_ENDS: Final = frozenset({"OutOfMemory", "OutOfDisk"})
"""The reasons of claims whose sandboxes ended because their own commands used up the memory or the disk."""
EXITED: Final = "SandboxExited"
"""The reason of a claim whose exec server ended, though nobody took its pod away."""
POLL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 10.0
"""The time to connect to a sandbox that is reported ready, in seconds.

Packets may be dropped while the node is busy.
"""
RELEASE_SECONDS: Final = 10.0
STATUS_SECONDS: Final = 10.0
_IMAGE_WORDS: Final = "image"
_COUNTERS: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


class ClaimProvider(SandboxProvider):
    """A SandboxProvider over claims (see `interface.SandboxProvider`).

    The driver prepares, keeps warm and removes the sandboxes, which do not end with a worker. The control
    plane knows and bounds all claims, so heartbeats name none of them, and a claim lives as long as its
    rollout needs it. The cluster's nodes fetch the images, and the cluster monitors its disks: it places pods
    elsewhere or reports why they wait.

    Args:
        claims: The control plane's calls.
        connect_seconds: The time in which a sandbox that is reported ready must answer, in seconds.
    """

    def __init__(self, claims: WorkerCalls, *, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._claims = claims
        self._connect_seconds = connect_seconds

    @property
    def name(self) -> str:
        """Return the provider name that handles of claimed sandboxes carry."""
        return PROVIDER

    async def acquire(self, request: SandboxRequest, owner: LeaseRef, *, for_eval: bool = False) -> Sandbox:
        """File a claim, wait until a driver has fulfilled it, and connect."""
        # A claim is filed under a lease and ends with it, so a claim for Eval needs no special treatment.
        shape = shape_of_key(request.key)
        filing = ClaimRequest(rollout=owner.rollout, token=owner.token, shape=shape, wait=POLL_SECONDS)
        claim = await persistent(lambda: self._claims.claim(filing))
        # A cancelled wait needs no release, because the claim ends with its lease.
        while claim.state == "Pending":
            claim = await self._status(claim.id, POLL_SECONDS)
        if claim.state != "Bound":
            raise _failure(claim, request)
        try:
            client = await connect(claim.address, self._connect_seconds, claim.secret)
            try:
                if client.proven_token is None:
                    # Whatever answered here later would pass for a program that has taken its place.
                    raise SandboxImpossible(
                        f"the exec server at {claim.address} does not prove that it knows its secret: its "
                        "driver must start it with --token-sha256"
                    )
                await apply(client, WORKDIR, request, None)
            except BaseException:
                await client.close()
                raise
        except SandboxProviderError:
            await self.release(claim.id)
            raise
        # No command has run yet, so the peer is the exec server. From now on it must prove that it is.
        handle = SandboxHandle(
            provider=PROVIDER, id=claim.id, node=NODE, address=claim.address, token=client.proven_token
        )
        return Sandbox(handle, client, WORKDIR, dict(request.env))

    async def attach(self, handle: SandboxHandle) -> Sandbox:
        """Connect to a sandbox that any worker has claimed."""
        if handle.provider != PROVIDER or handle.node != NODE:
            raise SandboxLost(
                f"sandbox {handle.id} is a {handle.provider} sandbox of node {handle.node!r}; "
                f"this worker has {PROVIDER} sandboxes"
            )
        # The settings of `acquire` apply to every new session and are not repeated.
        client = await connect(handle.address, self._connect_seconds, handle.token)
        return Sandbox(handle, client, WORKDIR, {})

    async def release(self, handle: SandboxHandle | str) -> None:
        """Give the claim back. The driver then removes its sandbox."""
        claim_id = handle if isinstance(handle, str) else handle.id
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await persistent(lambda: self._claims.release_claim(claim_id))
        except NotThere:
            return
        except (ControlPlaneRefused, TimeoutError) as error:
            log.warning("claim %s is left to the control plane, which releases it: %s", claim_id, error)

    async def oom_killed(self, handle: SandboxHandle | str) -> bool:
        """Return whether the memory limit has ended a process inside, or the sandbox as a whole.

        The cluster determines which of the two happens (the kubelet's `singleProcessOOMKill`). A sandbox that
        the kubelet evicted because it wrote more than its disk may hold counts as well.
        """
        address, secret = (handle.address, handle.token) if isinstance(handle, SandboxHandle) else ("", None)
        claim_id = handle if isinstance(handle, str) else handle.id
        try:
            if not address:
                claim = await self._asked(claim_id)
                # Commands have run in this sandbox, so the peer must prove that it is the exec server before
                # it gets the secret.
                address, secret = claim.address, f"{PROVEN}{claim.secret}"
                if claim.state != "Bound":
                    return claim.reason in OWN_ENDS
            client = await connect(address, self._connect_seconds, secret)
            try:
                return await _oom_kills(client) > 0
            finally:
                await client.close()
        except (SandboxLost, ExecError):
            return await self._ended_for_memory(claim_id)

    async def own_end(self, handle: SandboxHandle | str) -> str:
        """Return why a lost sandbox has ended by itself, as its driver sees its container."""
        if await self.oom_killed(handle):
            return OUT_OF_MEMORY
        try:
            claim = await self._asked(handle if isinstance(handle, str) else handle.id)
        except SandboxLost:
            return ""
        if claim.state != "Failed" or claim.reason != EXITED:
            return ""
        log.error("the exec server of claim %s ended by itself: this is a bug, please report it", claim.id)
        return CRASHED

    async def _ended_for_memory(self, claim_id: str) -> bool:
        """Return the driver's verdict on a sandbox that does not answer.

        The driver learns of the end with a delay.
        """
        deadline = time.monotonic() + STATUS_SECONDS
        while True:
            try:
                claim = await self._asked(claim_id)
            except SandboxLost:
                return False
            if claim.state != "Bound" or time.monotonic() >= deadline:
                return claim.state == "Failed" and claim.reason in OWN_ENDS
            await asyncio.sleep(0.5)

    async def _asked(self, claim_id: str) -> Claim:
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await self._status(claim_id, 0.0)
        except (ControlPlaneRefused, TimeoutError) as error:
            raise SandboxLost(f"nothing is known of sandbox {claim_id}: {error}") from error

    async def _status(self, claim_id: str, wait: float) -> Claim:
        try:
            return await persistent(lambda: self._claims.claim_status(claim_id, wait))
        except NotThere as error:
            raise SandboxLost(f"claim {claim_id} is gone: {error}") from error


def shape_of_key(key: SandboxKey) -> SandboxShape:
    """Return the shape that a claim asks for.

    Raises:
        ImageNotUsable: `sandbox.image` names a file or a folder, or another kind of image.
    """
    image = key.image or ""
    scheme, separator, rest = image.partition("://")
    if separator:
        if scheme != "docker" or not rest:
            raise ImageNotUsable(
                f"sandbox.image {image!r}: sandbox pods are started from container images; name one as in "
                "docker://python:3.12-slim or python:3.12-slim, or leave image out for the default"
            )
        image = rest
    if image.startswith(DOCKERFILE_IMAGE):
        raise ImageNotUsable(
            f"sandbox.image {image!r}: the task has a Dockerfile, whose image is built for Apptainer only; "
            "build it elsewhere, and name what was built in sandbox.images of the job"
        )
    if image.startswith(("/", ".")) or image.endswith((".sif", ".tar", ".img", ".squashfs")):
        raise ImageNotUsable(
            f"sandbox.image {image!r}: a file or folder of one machine is not a container image; name one as "
            "in docker://python:3.12-slim, or leave image out for the default"
        )
    return SandboxShape(
        image=image,
        cpu=key.cpu,
        memory_bytes=key.memory_bytes,
        disk_bytes=key.disk_bytes,
        processes=key.processes,
        folders=list(key.folders),
    )


def _failure(claim: Claim, request: SandboxRequest) -> SandboxProviderError:
    words = f"{claim.reason}: {claim.message}" if claim.message else claim.reason
    if claim.state != "Failed":
        return SandboxLost(f"claim {claim.id} was released before its sandbox was ready")
    if claim.retryable:
        return SandboxStartFailed(words)
    if _IMAGE_WORDS in claim.reason.lower():
        return ImageNotUsable(f"sandbox.image {request.image!r}: {words}")
    return SandboxImpossible(words)


async def _oom_kills(client: ExecClient) -> int:
    """Return how many processes the kernel has killed in the container's own control group."""
    for path in _COUNTERS:
        try:
            text = (await client.read_file(path, max_bytes=4096)).data.decode(errors="replace")
        except FileError:
            continue  # This is the file of the other version of control groups.
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0
