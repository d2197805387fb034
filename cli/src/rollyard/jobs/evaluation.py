"""Answers are evaluated on this machine, without a rollout and without a control plane."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard.errors import InvalidInput
from rollyard.extras import require

if TYPE_CHECKING:
    from rollyard_crds.fields.reward import RewardSpec
    from rollyard_crds.rolloutjob import RolloutJobSpec
    from rollyard_pipeline.sandboxes.interface import SandboxProvider
    from rollyard_pipeline.stages.rescoring import Rescorer

SAME_REWARD: Final = 1e-9
"""Rewards that differ by no more are the same, as for dynamic sampling."""


def same_reward(first: float | None, second: float | None) -> bool:
    """Return whether two rewards are the same, or both are missing."""
    if first is None or second is None:
        return first is second
    return abs(first - second) <= SAME_REWARD


def shown_reward(reward: float | None) -> str:
    """Return a reward for people, rounded to six digits."""
    return "none" if reward is None else f"{reward:.6g}"


def count_bounded(counter: Counter[str], name: str, most: int, others: str) -> str:
    """Count a name, or `others` in the place of a new one where there are `most`, and return what counted."""
    counted = name if name in counter or len(counter) < most else others
    counter[counted] += 1
    return counted


@contextmanager
def open_rescorer(
    command: str, handler: str, spec: RolloutJobSpec, reward: RewardSpec | None, by: str, sandbox: str
) -> Iterator[tuple[Rescorer, asyncio.Runner]]:
    """Provide a handler that evaluates answers, and the runner of its calls. Its sandboxes end with it.

    The stage worker's modules must be installed.

    Args:
        command: The name of the command that needs it.
        handler: The name of the handler.
        spec: The spec of the job.
        reward: The section `reward` that counts.
        by: Who asks for it, for the record.
        sandbox: The kind of the sandboxes, for a handler that needs some.

    Raises:
        UsageProblem: The handler needs a sandbox, whose modules are not installed.
        InvalidInput: The handler judges more than an answer, the reward needs a service, a name stands for
            nothing, or no sandbox can be started here.
    """
    from rollyard_pipeline.errors import PipelineError
    from rollyard_pipeline.sandboxes import open_provider
    from rollyard_pipeline.stages.rescoring import Rescorer

    with tempfile.TemporaryDirectory(prefix="ryr") as folder, asyncio.Runner() as runner:

        def provider() -> SandboxProvider:
            require(f"`rollyard {command} --handler {handler}`", "worker,sandbox", "sandbox")
            return open_provider(sandbox, run_dir=Path(folder), node=command)

        try:
            rescorer = Rescorer(handler, spec, reward, by, provider=provider)
            try:
                runner.run(rescorer.check())
                yield rescorer, runner
            finally:
                runner.run(rescorer.close())
        except PipelineError as error:
            raise InvalidInput(str(error)) from error
