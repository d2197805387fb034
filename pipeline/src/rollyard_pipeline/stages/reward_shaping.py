"""The reward of an Eval is made of components, within the time of the stage."""

from __future__ import annotations

import asyncio
import functools

from rollyard_crds.lease import Lease

from rollyard_pipeline.control_plane.calls import WorkerCalls
from rollyard_pipeline.errors import EvalTimeout
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.rewards.service import service_score
from rollyard_pipeline.rewards.shaping import Rewards


async def shaped(
    rewards: Rewards,
    control: WorkerCalls,
    lease: Lease,
    handler: Handler,
    context: StageContext,
    evaluation: Evaluation,
    seconds: float,
) -> Evaluation:
    """Return what the job's `reward` makes of an evaluation.

    Args:
        rewards: Makes rewards.
        control: The control plane, which asks the job's reward service.
        lease: The lease of Eval.
        handler: The handler that has evaluated.
        context: The context of Eval.
        evaluation: What the handler returned.
        seconds: The time limit in seconds.

    Raises:
        EvalTimeout: A function or a service took longer.
        PipelineError: The infrastructure failed; see `Rewards.shaped`.
    """
    reward = context.spec.reward
    service = None if reward is None else reward.service
    ask = None if service is None else functools.partial(service_score, control, lease, service)
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await rewards.shaped(handler, context, evaluation, ask)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EvalTimeout(f"the reward was not made within {seconds:g} s") from error
