"""The handler `unscored`: it gives no reward of its own, and leaves it to a reward function or service."""

from __future__ import annotations

from rollyard_crds.fields.signals import SHIPPED

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext


class UnscoredHandler(Handler):
    """Returns 0 for every episode.

    A job with this handler has a `reward.function` or a `reward.service`, whose result is the reward.
    """

    needs_sandbox = False
    reward_range = SHIPPED["unscored"].reward

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return a score of 0."""
        return Evaluation(0.0)
