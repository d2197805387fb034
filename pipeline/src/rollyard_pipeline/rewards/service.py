"""The job's reward service, which the control plane asks on behalf of the worker."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from rollyard_crds.fields.reward import RewardServiceSpec
from rollyard_crds.lease import Lease, RewardRequest
from rollyard_process.backoff import Backoff

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.errors import RewardServiceFailed

_PAUSES: Final = Backoff(first=0.2, longest=5.0, jitter=0.5)
"""The pauses between requests to a service that gave no score."""


async def service_score(
    control: WorkerCalls, lease: Lease, service: RewardServiceSpec, episode: dict[str, Any]
) -> dict[str, Any]:
    """Return what the service says about an episode, after at most `maxAttempts` requests.

    While the control plane does not answer, this waits; the caller limits the time.

    Raises:
        RewardServiceFailed: The service gave no score, or may not be asked.
    """
    request = RewardRequest(rollout=lease.rollout, token=lease.token, episode=episode)
    asked = unavailable = 0
    while True:
        try:
            answer = await control.reward(request, service.timeout_seconds)
        except ControlPlaneUnavailable as error:
            unavailable += 1
            await asyncio.sleep(TRY_AGAIN.pause(unavailable, error.retry_after))
            continue
        if not answer.error:
            return {"reward": answer.reward, "components": answer.components}
        asked += 1
        if asked >= service.max_attempts or not answer.retryable:
            tries = "1 try" if asked == 1 else f"{asked} tries"
            raise RewardServiceFailed(f"the reward service gave no score in {tries}; last: {answer.error}")
        await asyncio.sleep(_PAUSES.pause(asked))
