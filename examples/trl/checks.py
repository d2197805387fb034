"""TRL's GRPO trainer, which also looks at what it trains on.

For each step it records how far the log-probabilities of the rollouts are from its own, and the gradient of
the loss at tokens that the policy did not sample, which must be exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer


class CheckedTrainer(GRPOTrainer):
    """A GRPO trainer whose `seen` has one entry for each step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[dict[str, Any]] = []
        self._versions: list[list[str]] = []
        self._logps: torch.Tensor | None = None
        asked = self.rollout_func

        def recorded(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output: dict[str, Any] = asked(prompts, trainer)
            self._versions = output["policy_versions"]
            return output

        self.rollout_func = recorded

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            own, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, attention, batch["completion_ids"].size(1)
            )
        sampled = (batch["completion_mask"] * batch["tool_mask"]).bool()
        difference = (own - batch["sampling_per_token_logps"]).abs()[sampled]
        versions = {version for row in self._versions for version in row if version}
        self.seen.append(
            {
                "sampled_tokens": int(sampled.sum()),
                "env_tokens": int((batch["completion_mask"].bool() & ~sampled).sum()),
                "logprob_difference": float(difference.max()) if difference.numel() else 0.0,
                "policy_versions": sorted(versions),
                "informative_rows": int((batch["advantages"] != 0).sum()),
            }
        )
        return batch

    def _get_per_token_logps_and_entropies(self, *args: Any, **options: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **options)
        if found[0].requires_grad:
            found[0].retain_grad()
            self._logps = found[0]
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        self._learnt = self._mask & (inputs["advantages"] != 0).unsqueeze(1)
        loss: torch.Tensor = super()._compute_loss(model, inputs)
        return loss

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Take a step, and record the gradient of the loss by the log-probability of each token."""
        loss: torch.Tensor = super().training_step(*args, **options)
        assert self._logps is not None
        gradient = self._logps.grad
        assert gradient is not None
        outside, learnt = gradient[~self._mask].abs(), gradient[self._learnt].abs()
        self.seen[-1] |= {
            "gradient_outside": float(outside.max()) if outside.numel() else 0.0,
            "learnt_tokens": int((learnt > 0).sum()),
            "learnable_tokens": int(self._learnt.sum()),
        }
        return loss
