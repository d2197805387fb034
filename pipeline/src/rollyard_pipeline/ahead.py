"""What a worker of one job begins before it has a lease: its first sandbox."""

from __future__ import annotations

import contextlib

from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_pipeline.errors import ExtensionError
from rollyard_pipeline.registry import HANDLERS, Registry
from rollyard_pipeline.sandboxes.errors import SandboxError
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest


async def first_sandbox(
    provider: SandboxProvider, job: RolloutJobSpec, extensions: Registry
) -> SandboxRequest | None:
    """Begins to start one of the job's sandboxes in the background, if its handler always wants one.

    Only one: the first rollout is to have the machine's cores for itself. What is wrong with the image or
    the handler is left for the first lease to tell, which has somebody to tell it to.

    Returns:
        What the warm pool may be filled with once the worker is ready; None where nothing was begun.
    """
    if not job.sandbox.warm:
        return None
    with contextlib.suppress(ExtensionError, SandboxError):
        if extensions.load(HANDLERS, job.handler).needs_sandbox:
            request = SandboxRequest.of(job.sandbox)
            await provider.warm(request, 1)
            return request
    return None
