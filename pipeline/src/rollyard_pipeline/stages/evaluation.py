"""One evaluation: prepare the sandbox against tampering by Run, call the handler, judge failures, reward."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Final

from pydantic import TypeAdapter, ValidationError
from rollyard_crds.lease import Lease
from rollyard_crds.trajectory import MAX_REWARD, RewardReason
from rollyard_sandbox.client import EvalPlace, ExecClient
from rollyard_sandbox.errors import SandboxError as ExecError
from rollyard_sandbox.errors import SandboxSabotaged

from rollyard_pipeline import sabotage
from rollyard_pipeline.control_plane.calls import WorkerCalls
from rollyard_pipeline.errors import EvalTimeout, PermanentFailure
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.environment import evaluation_environment
from rollyard_pipeline.handlers.isolated.places import blocked
from rollyard_pipeline.rewards.shaping import Rewards, service_score

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 30.0
"""The limit of each small program or request that inspects the sandbox, in seconds.

It is longer than even a busy node needs.
"""
Lend = Callable[[], AbstractAsyncContextManager[Mapping[str, str]]]
"""Lends a sandbox a network, and provides the variables that lead programs to it."""
_REASON: Final = TypeAdapter[str](RewardReason)


async def evaluate(
    handler: Handler,
    context: StageContext,
    seconds: float,
    *,
    untouched: bool = False,
    network: Lend | None = None,
) -> Evaluation:
    """Return the score of an episode.

    If the handler uses the sandbox, every process of Run is killed first, and whatever the handler starts in
    the sandbox gets the environment of `evaluation_environment`.

    Args:
        context: The context of Eval, with the sandbox's client if there is a sandbox.
        seconds: The time limit in seconds. It includes the time in which a handler that enforces the limit
            itself reports that it was exceeded.
        untouched: Whether the sandbox contains no file of the policy, and runs none of its programs. If so, a
            defect of the sandbox is not the policy's fault.
        network: Lends the sandbox the network of the tests, if they have one.

    Raises:
        EvalTimeout: The evaluation took longer, and not because of what ran in the sandbox.
        PermanentFailure: The handler returned rewards outside of what it declares.
        Exception: The infrastructure failed.
    """
    client = context.client if handler.needs_sandbox else None
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            if client is not None:
                await _begin(client, context, networked=network is not None)
            async with nullcontext({}) if network is None else network() as variables:
                context.eval_env = {**context.eval_env, **variables}
                evaluation = await handler.eval(context)
    except TimeoutError as error:
        if not limit.expired():
            raise
        if client is not None and await _was_at_work(client):
            return Evaluation(0.0, {"test_timeout": 1.0}, sabotage.TEST_TIMEOUT)
        culprit = blocked(error) or f"handler '{context.spec.handler}'"
        raise EvalTimeout(f"Eval took longer than {seconds:g} s: {culprit}") from error
    except ExecError as error:
        if untouched:
            raise
        reason = sabotage.reward_reason(error)
        if not reason and client is not None and await sabotage.was_removed(client, error):
            reason = sabotage.SABOTAGED
        if not reason:
            raise
        log.info("%s: reward 0 (%s): %s: %s", context.rollout, reason, error.reason, error)
        context.show(f"{error.reason}: {error}")
        return Evaluation(0.0, {}, reason)
    _check(handler, context.spec.handler, evaluation)
    return evaluation


async def _begin(client: ExecClient, context: StageContext, *, networked: bool) -> None:
    """Kill everything that Run left running, and undo its influence on what the evaluation starts.

    Raises:
        SandboxSabotaged: The sandbox was tampered with. The message gives the evidence.
    """
    place = await client.begin_eval(network=networked)
    if place.sabotage:
        raise SandboxSabotaged("; ".join(place.sabotage))
    if networked:
        place = await _with_room(client, place)
    variables = {**context.env, **place.environment}
    environment = evaluation_environment(variables, place, workdir=context.workdir, author=context.env)
    # This is for commands that a handler starts by itself. No call removes a variable, so it is set to "".
    changed = {name: value for name, value in environment.items() if variables.get(name) != value}
    await client.set_env(changed | dict.fromkeys(variables.keys() - environment.keys() - {"_"}, ""))
    context.place, context.eval_env = place, environment


async def _with_room(client: ExecClient, place: EvalPlace) -> EvalPlace:
    """Return the place with HOME and TMPDIR on the sandbox's disk, for what the tests fetch.

    The sandbox is a fresh one, so no more than the tests' own programs can write there either.
    """
    top = f"/tmp/eval-{secrets.token_hex(8)}"
    for name in ("home", "tmp"):
        await client.write_file(f"{top}/{name}/.made", b"")
        await client.remove(f"{top}/{name}/.made")
    return replace(place, home=f"{top}/home", tmp=f"{top}/tmp")


async def _was_at_work(client: ExecClient) -> bool:
    """Return whether the time was spent in a request to the sandbox whose server still answers."""
    if not client.unanswered:
        return False
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await client.info()
    except (ExecError, TimeoutError):
        return False
    return True


def _check(handler: Handler, name: str, evaluation: Evaluation) -> None:
    low, high = handler.reward_range
    for field, value in {"reward": evaluation.reward, **evaluation.components}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PermanentFailure(
                f"handler '{name}': {field} is {value!r}, expected a finite number", "EvaluationInvalid"
            )
        if abs(value) > MAX_REWARD:
            raise PermanentFailure(
                f"handler '{name}': {field} is {value!r}, expected at most {MAX_REWARD:,.0f} in size",
                "EvaluationInvalid",
            )
    if not low <= evaluation.reward <= high:
        raise PermanentFailure(
            f"handler '{name}': reward {evaluation.reward!r} is not in reward_range, {low:g} to {high:g}",
            "EvaluationInvalid",
        )
    try:
        _REASON.validate_python(evaluation.reason)
    except ValidationError as error:
        raise PermanentFailure(
            f"handler '{name}': reason is {evaluation.reason!r}, expected one CamelCase word or nothing",
            "EvaluationInvalid",
        ) from error


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
