"""One evaluation: prepared where Run could not write, done by the handler, judged where it cannot be done."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final

from pydantic import TypeAdapter, ValidationError
from rollyard_crds.trajectory import MAX_REWARD, RewardReason
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import LaunchError, SandboxSabotaged
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline import sabotage
from rollyard_pipeline.errors import EvalTimeout, EvaluationInvalid
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.environment import evaluation_environment

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 30.0
"""For each small program or request that looks at the sandbox: more than a busy node takes."""
_VARIABLES_BYTES: Final = 1 << 20
_REASON: Final = TypeAdapter[str](RewardReason)


async def evaluate(
    handler: Handler, context: StageContext, seconds: float, *, untouched: bool = False
) -> Evaluation:
    """Score an episode.

    Where the handler uses the sandbox, every process of Run is killed first, and whatever the handler starts
    in it has the environment of `evaluation_environment`.

    Args:
        context: Eval's, with the sandbox's client where there is one.
        seconds: how long it may take, the time included in which a handler that keeps its own limit says so.
        untouched: no file of the policy's is in the sandbox: what is wrong with it is not its failing.

    Raises:
        EvalTimeout: it took longer, and not for what ran in the sandbox.
        EvaluationInvalid: the handler's rewards are not what it says they are.
        Exception: infrastructure failed.
    """
    client = context.client if handler.needs_sandbox else None
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            if client is not None:
                await _begin(client, context)
            evaluation = await handler.eval(context)
    except TimeoutError as error:
        if not limit.expired():
            raise
        if client is not None and await _was_at_work(client):
            return Evaluation(0.0, {"test_timeout": 1.0}, sabotage.TEST_TIMEOUT)
        raise EvalTimeout(f"Eval took longer than {seconds:g} s") from error
    except ExecError as error:
        if untouched:
            raise
        reason = sabotage.reward_reason(error)
        if not reason and client is not None and await _was_removed(client, error):
            reason = sabotage.SABOTAGED
        if not reason:
            raise
        log.info("%s: reward 0 (%s): %s: %s", context.rollout, reason, error.reason, error)
        return Evaluation(0.0, {}, reason)
    _check(handler, context.spec.handler, evaluation)
    return evaluation


async def _begin(client: ExecClient, context: StageContext) -> None:
    """Leave nothing of Run running, and nothing that Run wrote on the way of what the evaluation starts.

    Raises:
        SandboxSabotaged: with the evidence.
    """
    place = await client.begin_eval()
    if place.sabotage:
        raise SandboxSabotaged("; ".join(place.sabotage))
    variables = {**context.env, **await _variables(client)}
    environment = evaluation_environment(variables, place, workdir=context.workdir, author=context.env)
    # For what a handler starts by itself. There is no call that removes a variable: empty ones say nothing.
    changed = {name: value for name, value in environment.items() if variables.get(name) != value}
    await client.set_env(changed | dict.fromkeys(variables.keys() - environment.keys() - {"_"}, ""))
    context.place, context.eval_env = place, environment


async def _variables(client: ExecClient) -> dict[str, str]:
    """The sandbox's environment; empty where it has no program that shows it.

    Raises:
        SandboxSabotaged: the program did not end as it should.
    """
    try:
        shown = await client.run(["env", "-0"], cwd="/", timeout=_LOOK_SECONDS, max_output=_VARIABLES_BYTES)
    except LaunchError as error:
        if error.reason == "ProgramNotFound":
            return {}
        raise
    if shown.exit_code != 0:
        raise SandboxSabotaged(f"`env` ended with {shown.exit_code}: {shown.text()[-200:]}")
    pairs = (line.partition("=") for line in shown.text().split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}


async def _was_at_work(client: ExecClient) -> bool:
    """Whether the time went to a request to the sandbox, whose server still answers."""
    if not client.unanswered:
        return False
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            await client.info()
    except (ExecError, TimeoutError):
        return False
    return True


async def _was_removed(client: ExecClient, error: ExecError) -> bool:
    """Whether a program that is missing may have been removed by Run: the system can be written to."""
    if error.reason != "ProgramNotFound":
        return False
    try:
        looked = await client.run(["test", "-w", "/usr/bin"], cwd="/", timeout=_LOOK_SECONDS)
    except ExecError:
        return False
    return looked.exit_code == 0


def _check(handler: Handler, name: str, evaluation: Evaluation) -> None:
    low, high = handler.reward_range
    for field, value in {"reward": evaluation.reward, **evaluation.components}.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise EvaluationInvalid(f"handler '{name}': {field} is {value!r}, expected a finite number")
        if abs(value) > MAX_REWARD:
            raise EvaluationInvalid(
                f"handler '{name}': {field} is {value!r}, expected at most {MAX_REWARD:,.0f} in size"
            )
    if not low <= evaluation.reward <= high:
        raise EvaluationInvalid(
            f"handler '{name}': reward {evaluation.reward!r} is not in reward_range, {low:g} to {high:g}"
        )
    try:
        _REASON.validate_python(evaluation.reason)
    except ValidationError as error:
        raise EvaluationInvalid(
            f"handler '{name}': reason is {evaluation.reason!r}, expected one CamelCase word or nothing"
        ) from error
