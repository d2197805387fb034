"""Many rollouts of the policy at once: sample a turn for all, run all the calls, until all have ended."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen3ForCausalLM

from tinypolicy.chat import IM_END, chat_template, parse_call, token_id, user
from tinypolicy.shell import run_round, run_scripts, write_folder
from tinypolicy.tasks import Task, ToolCall

#: Which tool results a rollout sees: its own, or those of a rollout of another task at the same turn.
Swap = Literal["none", "same-template", "any-task"]

MAX_TURNS: Final = 8
MAX_TURN_TOKENS: Final = 64
_SAMPLING_BATCH: Final = 256


@dataclass(slots=True)
class _Rollout:
    task: Task
    folder: Path
    partner: int
    ids: list[int]
    turns: int = 0
    sampled: int = 0
    answer: str = ""
    ended: bool = False
    result: str = "(no output)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rollout's end. `sampled` counts the tokens that the policy emitted in all its turns."""

    task: Task
    solved: bool
    turns: int
    sampled: int
    submitted: bool


@torch.inference_mode()
def sample_turns(
    model: Qwen3ForCausalLM,
    prompts: Sequence[Sequence[int]],
    stop: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    max_tokens: int = MAX_TURN_TOKENS,
) -> list[list[int]]:
    """Sample one turn per prompt, up to `stop` (included) or `max_tokens`, from the whole distribution."""
    turns: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), _SAMPLING_BATCH):
        chosen = order[start : start + _SAMPLING_BATCH]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.zeros((len(chosen), width), dtype=torch.long)
        attention = torch.zeros((len(chosen), width), dtype=torch.long)
        for row, index in enumerate(chosen):
            ids[row, width - len(prompts[index]) :] = torch.tensor(prompts[index])
            attention[row, width - len(prompts[index]) :] = 1
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        open_rows = torch.ones(len(chosen), dtype=torch.bool)
        for _ in range(max_tokens):
            hidden = model.model(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            probabilities = torch.softmax(model.lm_head(hidden) / temperature, dim=-1)
            token = torch.multinomial(probabilities, 1, generator=generator)
            for row, value in enumerate(token[:, 0].tolist()):
                if open_rows[row]:
                    turns[chosen[row]].append(value)
            open_rows &= token[:, 0] != stop
            if not bool(open_rows.any()):
                break
            ids = token
            attention = torch.cat([attention, torch.ones((len(chosen), 1), dtype=torch.long)], dim=1)
            positions = positions[:, -1:] + 1
    return turns


def partners(tasks: Sequence[Task], samples: int, swap: Swap, rng: random.Random) -> list[int]:
    """Return for each rollout (task-major) the index of the rollout whose tool results it sees.

    Under a swap each rollout's partner belongs to another task: the next one in a shuffled ring of all
    tasks, or of the tasks of the same template (so that the foreign results look as expected).
    """
    if swap == "none":
        return list(range(len(tasks) * samples))
    rings: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        rings.setdefault(task.template if swap == "same-template" else "", []).append(index)
    chosen = [0] * (len(tasks) * samples)
    for ring in rings.values():
        if len(ring) < 2:
            raise ValueError("a swap needs two tasks of every template")
        rng.shuffle(ring)
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            for sample in range(samples):
                chosen[here * samples + sample] = there * samples + sample
    return chosen


def roll_out(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    swap: Swap = "none",
    temperature: float = 1.0,
) -> list[Outcome]:
    """Play `samples` rollouts of each task, task-major, with real tools in a folder each, scored by its
    script.

    A rollout ends when it submits, calls nothing, fails to stop a turn, or has had `MAX_TURNS` turns; it is
    scored in every case. Under a swap the calls still run in the rollout's own folder, and only what it sees
    is another's.
    """
    model.train(False)
    template = chat_template()
    stop = token_id(tokenizer, IM_END)
    generator = torch.Generator().manual_seed(seed)
    partner = partners(tasks, samples, swap, random.Random(seed))
    root = Path(tempfile.mkdtemp(prefix="tiny-policy-"))
    try:
        rollouts = []
        for index, task in enumerate(task for task in tasks for _ in range(samples)):
            folder = root / "folders" / str(index)
            folder.mkdir(parents=True)
            write_folder(folder, task.draft.files)
            prompt = template.render(messages=[user(task.draft.prompt)], add_generation_prompt=True)
            rollouts.append(_Rollout(task, folder, partner[index], tokenizer.encode(prompt).ids))
        for _ in range(MAX_TURNS):
            at_work = [r for r in rollouts if not r.ended]
            if not at_work:
                break
            turns = sample_turns(model, [r.ids for r in at_work], stop, generator, temperature)
            _take_turns(root, tokenizer, at_work, turns, stop)
            for rollout in at_work:
                if not rollout.ended:
                    shown = rollouts[rollout.partner].result
                    # The template renders it like this between two assistant turns (a test compares both).
                    after = f"\n<|im_start|>user\n<tool_response>\n{shown}\n</tool_response><|im_end|>\n"
                    rollout.ids += tokenizer.encode(f"{after}<|im_start|>assistant\n").ids
        return _score(root, rollouts)
    finally:
        shutil.rmtree(root)


def _take_turns(
    root: Path, tokenizer: Tokenizer, rollouts: list[_Rollout], turns: list[list[int]], stop: int
) -> None:
    running: list[tuple[_Rollout, ToolCall]] = []
    for rollout, turn in zip(rollouts, turns, strict=True):
        rollout.ids += turn
        rollout.turns += 1
        rollout.sampled += len(turn)
        call = parse_call(tokenizer.decode(turn)) if turn[-1] == stop else None
        if call is None:
            rollout.ended = True
        elif call.name == "submit":
            rollout.answer = call.arguments.get("answer", "")
            rollout.ended = True
        else:
            running.append((rollout, call))
    results = run_round(root, [(rollout.folder, call) for rollout, call in running])
    for (rollout, _), result in zip(running, results, strict=True):
        rollout.result = result


def _score(root: Path, rollouts: list[_Rollout]) -> list[Outcome]:
    jobs = [(r.folder, r.task.draft.test_script, {"ROLLYARD_ANSWER": r.answer}) for r in rollouts]
    codes = [code for _, code in run_scripts(root, jobs)]
    return [
        Outcome(r.task, code == 0, r.turns, r.sampled, bool(r.answer))
        for r, code in zip(rollouts, codes, strict=True)
    ]
