"""Steps of TRL's own GRPO trainer on rollouts from a whole Rollyard, each checked token by token."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from rollyard_testing.integrations.trl_run import TrlMissing, trained_with_trl, trl_python

from rollyard_bench.processes import Missing, needed
from rollyard_bench.registry import Measurement, Settings

STEPS: Final = 20
SAMPLES: Final = 4
TOLERANCE: Final = 1e-4
"""Both sides compute in float32, and differ by a few millionths. An optimizer step changes more than this."""


def _right(step: dict[str, Any]) -> bool:
    """Return whether the record of a step is that of the trainer, and only sampled tokens were learnt."""
    learnt = step["learnt_tokens"] == step["learnable_tokens"]
    return step["logprob_difference"] <= TOLERANCE and step["gradient_outside"] == 0.0 and learnt


async def measure(settings: Settings) -> list[Measurement]:
    """Run examples/trl, and count the steps that are right, from the first to the first that is not."""
    needed("bwrap", "bubblewrap")
    try:
        python = await asyncio.to_thread(trl_python)
    except TrlMissing as error:
        said = str(error).splitlines()[-1]
        raise Missing(f"no TRL: scripts/train-env trl makes it, or TRAIN_PYTHON names it; {said}") from error
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        options = ("--steps", str(STEPS), "--samples", str(SAMPLES))
        summary = await asyncio.to_thread(trained_with_trl, python, Path(name), *options)
    steps = summary["checks"]
    right = next((place for place, step in enumerate(steps) if not _right(step)), len(steps))
    rewards = summary["reward"]
    sampled, outside = (sum(step[name] for step in steps) for name in ("sampled_tokens", "env_tokens"))
    worst = max(step["logprob_difference"] for step in steps)
    how = (
        f"{summary['rollouts']} rollouts in {summary['wall_seconds']:.0f} s; largest difference of a "
        f"log-probability: {steps[0]['logprob_difference']:.1e} nats at step 0, {worst:.1e} over all; "
        f"{sampled} sampled tokens, and {outside} of tools and template, whose gradient is 0; median reward "
        f"of the first five steps {median(rewards[:5]):.2f}, of the last five {median(rewards[-5:]):.2f}"
    )
    return [Measurement("trl_steps", float(right), None, how)]
