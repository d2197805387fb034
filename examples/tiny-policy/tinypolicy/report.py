"""What the policy is worth: success on held-out tasks, and what is left of it under swapped outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from tinypolicy.rollouts import Outcome, roll_out
from tinypolicy.tasks import Task


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


def _success_by(outcomes: Sequence[Outcome], key: Callable[[Task], str]) -> dict[str, float]:
    keys = sorted({key(o.task) for o in outcomes})
    return {k: _mean([o.solved for o in outcomes if key(o.task) == k]) for k in keys}


def informative_groups(outcomes: Sequence[Outcome]) -> int:
    """Return how many tasks have some samples solved and some not: the groups that a DAPO trainer keeps."""
    solved: dict[str, set[bool]] = {}
    for outcome in outcomes:
        solved.setdefault(outcome.task.id, set()).add(outcome.solved)
    return sum(len(values) == 2 for values in solved.values())


def evaluate(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, tasks: Sequence[Task], samples: int, seed: int
) -> dict[str, object]:
    """Return success at temperature 1, per family and template, and under both swaps of tool outputs."""
    own = roll_out(model, tokenizer, tasks, samples, seed)
    swapped = roll_out(model, tokenizer, tasks, samples, seed, swap="same-template")
    foreign = roll_out(model, tokenizer, tasks, samples, seed, swap="any-task")
    turns = sum(o.turns for o in own)
    return {
        "tasks": len(tasks),
        "samples_per_task": samples,
        "temperature": 1.0,
        "seed": seed,
        "success": _mean([o.solved for o in own]),
        "success_per_family": _success_by(own, lambda task: task.family),
        "success_per_template": _success_by(own, lambda task: task.template),
        "informative_groups": informative_groups(own),
        "swapped_success_same_template": _mean([o.solved for o in swapped]),
        "swapped_success_any_task": _mean([o.solved for o in foreign]),
        "submitted": _mean([o.submitted for o in own]),
        "turns_per_rollout": round(turns / len(own), 3),
        "tokens_per_turn": round(sum(o.sampled for o in own) / turns, 3),
        "tokens_per_rollout": round(sum(o.sampled for o in own) / len(own), 3),
    }
