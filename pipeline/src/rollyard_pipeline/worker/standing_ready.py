"""A worker that stands ready asks for its assignment, with a token that can do nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import Final

from rollyard_crds.base import build_all
from rollyard_crds.workers import Assignment, AssignmentRequest

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable, WorkerCalls

WAIT_SECONDS: Final = 30.0
"""The longest time that one request waits for an offer, in seconds."""
_MODULES: Final = ("aiohttp", "encodings.idna")
"""The modules that a worker imports with its first requests."""


def import_all() -> None:
    """Import and build what a worker needs later, so that an assigned worker begins at once."""
    for name in _MODULES:
        # They only save time. A module that this installation lacks is not needed by it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    build_all()


async def assignment_of(
    control: WorkerCalls, namespace: str, worker: str, driver: str, wait: float = WAIT_SECONDS
) -> Assignment:
    """Ask for the assignment of a ready worker until a driver has offered one.

    The worker stands ready as long as its driver lets it live. A control plane that does not answer is asked
    again with growing pauses.

    Raises:
        ControlPlaneRefused: The token is not valid, or the assignment was handed out or withdrawn before.
    """
    request = AssignmentRequest(namespace=namespace, worker=worker, driver=driver, wait=wait)
    tries = 0
    while True:
        try:
            assignment = await control.assignment(request)
        except ControlPlaneUnavailable as error:
            tries += 1
            await asyncio.sleep(TRY_AGAIN.pause(tries, error.retry_after))
            continue
        tries = 0
        if assignment is not None:
            return assignment
