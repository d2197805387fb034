"""What a worker of one job begins before it has a lease: its first sandbox."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Final

from rollyard_pipeline.errors import ExtensionError, OptionError
from rollyard_pipeline.sandboxes.errors import SandboxError
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJobSpec, StagesSpec

    from rollyard_pipeline.registry import Registry

WITHOUT: Final = frozenset({"math"})
"""Shipped handlers that need no sandbox, known without importing them."""


def request_of(job: RolloutJobSpec, extensions: Registry) -> SandboxRequest | None:
    """The sandbox that every rollout of the job will want; None where that is not sure, or none is kept warm.

    A handler that is not installed is left for the first lease to tell, which has somebody to tell it to.
    """
    from rollyard_pipeline.registry import HANDLERS

    if job.sandbox.warm:
        with contextlib.suppress(ExtensionError):
            if extensions.load(HANDLERS, job.handler).needs_sandbox:
                return SandboxRequest.of(job.sandbox)
    return None


def stages_of(job: RolloutJobSpec | None) -> StagesSpec:
    """A job's stages; the defaults where there is no job."""
    from rollyard_crds.rolloutjob import StagesSpec

    return StagesSpec() if job is None else job.stages


def first_sandbox(text: str) -> SandboxRequest | None:
    """What `--first-sandbox` says: a job's handler and sandbox, before the job itself is known.

    Raises:
        OptionError: it is no such JSON.
    """
    try:
        said = json.loads(text)
        image = said["image"]
        request = SandboxRequest(
            image=None if image is None else str(image),
            cpu=float(said["cpu"]),
            memory_bytes=int(said["memory_bytes"]),
            disk_bytes=int(said["disk_bytes"]),
            processes=int(said["processes"]),
        )
        return None if said["handler"] in WITHOUT else request
    except (ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"--first-sandbox: {text[:200]!r} is not what a driver says ({type(error).__name__}: {error}); "
            "leave it out, and the worker asks for its job first"
        ) from error


async def keep_warm(provider: SandboxProvider, request: SandboxRequest | None, count: int) -> None:
    """Has so many started in the background; what is wrong with the image the first lease tells."""
    if request is not None:
        with contextlib.suppress(SandboxError):
            await provider.warm(request, count)
