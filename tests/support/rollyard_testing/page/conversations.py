"""Trajectories as Run records them: a conversation whose tokens come from a real tokenizer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import rollyard_engine
from tokenizers import Tokenizer

TINY_POLICY: Final = Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"
"""The folder of the shipped policy, whose tokenizer gives the ids and their texts."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the policy says in one turn, the call that it makes, and what the tool answers."""

    text: str
    command: str = ""
    output: str = ""


class Conversations:
    """A writer of trajectories, which are the same for the same seed.

    Args:
        tokenizer: The folder of a `tokenizer.json`.
        seed: The seed of the log-probabilities.
    """

    def __init__(self, tokenizer: Path = TINY_POLICY, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        self._rng = random.Random(seed)

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def trajectory(
        self, prompt: str, steps: Sequence[Step], versions: Sequence[str], **fields: Any
    ) -> dict[str, Any]:
        """Return what Run records of a conversation with one segment.

        Args:
            prompt: The first message of the user.
            steps: The turns of the policy.
            versions: The policy version of each turn; the last one holds for the turns that follow.
            fields: Further fields of the record, which replace those made here.
        """
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        labels: list[str] = []
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        turns: list[dict[str, Any]] = []
        for number, step in enumerate(steps):
            version = versions[min(number, len(versions) - 1)]
            sampled = self.ids(f"{step.text}\n{step.command}")
            turns.append(self._turn(len(response), len(sampled), step))
            response += sampled
            mask += [1] * len(sampled)
            logprobs += [-round(self._rng.expovariate(2.0), 6) for _ in sampled]
            labels += [version] * len(sampled)
            messages.append({"role": "assistant", "content": step.text, **self._calls(number, step)})
            if step.command:
                read = self.ids(step.output)
                response += read
                mask += [0] * len(read)
                logprobs += [0.0] * len(read)
                labels += [""] * len(read)
                messages.append(
                    {"role": "tool", "name": "bash", "content": step.output, "tool_call_id": f"call_{number}"}
                )
        segment = {
            "prompt_ids": self.ids(prompt),
            "response_ids": response,
            "loss_mask": mask,
            "logprobs": logprobs,
            "policy_versions": labels,
        }
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 64, "seed": 0}
        return {"segments": [segment], "messages": messages, "turns": turns, "sampling": sampling} | fields

    def _calls(self, number: int, step: Step) -> dict[str, Any]:
        if not step.command:
            return {}
        call = {"name": "bash", "arguments": {"command": step.command}}
        return {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": call}]}

    def _turn(self, start: int, length: int, step: Step) -> dict[str, Any]:
        calls = []
        if step.command:
            calls.append({"name": "bash", "arguments": {"command": step.command}, "seconds": 0.02})
        return {
            "segment": 0,
            "start": start,
            "end": start + length,
            "finish_reason": "tool_calls" if step.command else "stop",
            "tool_calls": calls,
            "model_seconds": round(self._rng.uniform(0.1, 2.0), 3),
            "tool_seconds": 0.02 if step.command else 0.0,
        }

    def of_length(self, tokens: int, prompt_tokens: int = 2000) -> dict[str, Any]:
        """Return a trajectory of about so many tokens in all: one turn in three is a tool's output."""
        words = ("sort", "the", "rows", "of", "data", "by", "third", "column", "and", "count", "willow")

        def some(count: int) -> str:
            return " ".join(self._rng.choice(words) for _ in range(count))

        sample = some(1000)
        each = len(self.ids(sample)) / 1000
        rest = tokens - prompt_tokens
        count = max(1, round(rest / 1500))
        share = max(1, round(rest / count / each / 3))
        steps = [Step(some(2 * share - 4), some(4), some(share)) for _ in range(count)]
        versions = [f"step-{10 + number // 8}" for number in range(count)]
        return self.trajectory(some(round(prompt_tokens / each)), steps, versions)
