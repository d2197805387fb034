"""What a worker of one job begins before it has a lease: its first sandbox."""

from __future__ import annotations

import contextlib

from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_pipeline.errors import ExtensionError
from rollyard_pipeline.registry import HANDLERS, Registry
from rollyard_pipeline.sandboxes.errors import SandboxError
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest


def request_of(job: RolloutJobSpec, extensions: Registry) -> SandboxRequest | None:
    """The sandbox that every rollout of the job will want; None where that is not sure, or none is kept warm.

    A handler that is not installed is left for the first lease to tell, which has somebody to tell it to.
    """
    if job.sandbox.warm:
        with contextlib.suppress(ExtensionError):
            if extensions.load(HANDLERS, job.handler).needs_sandbox:
                return SandboxRequest.of(job.sandbox)
    return None


async def keep_warm(provider: SandboxProvider, request: SandboxRequest | None, count: int) -> None:
    """Has so many started in the background; what is wrong with the image the first lease tells."""
    if request is not None:
        with contextlib.suppress(SandboxError):
            await provider.warm(request, count)
