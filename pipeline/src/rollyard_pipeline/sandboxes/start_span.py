"""The span of the start of one sandbox."""

from __future__ import annotations

import time

from rollyard_crds.lease import LeaseRef
from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import current
from rollyard_process.telemetry.spans import Value

from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest


async def sandbox_started(
    provider: SandboxProvider, request: SandboxRequest, ref: LeaseRef, *, for_eval: bool = False
) -> Sandbox:
    """Call `provider.acquire` with these arguments, and add the span of it to the current rollout.

    Raises:
        Exception: The provider raised it.
    """
    began, failure = time.monotonic(), ""
    try:
        return await provider.acquire(request, ref, for_eval=for_eval)
    except BaseException as error:
        failure = type(error).__name__
        raise
    finally:
        scope = current()
        if scope is not None:
            attributes: dict[str, Value] = {names.SANDBOX: provider.name}
            if failure:
                attributes[names.ERROR_TYPE] = failure
            scope.add(names.SANDBOX_SPAN, time.monotonic() - began, attributes, error=failure)
