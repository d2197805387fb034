"""Demonstrations: the reference solutions, really run, as token ids with the policy's own tokens marked."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from tinypolicy.chat import (
    IM_END,
    IM_START,
    Message,
    assistant,
    assistant_mask,
    chat_template,
    token_id,
    tool,
    train_tokenizer,
    user,
)
from tinypolicy.shell import run_round, write_folder
from tinypolicy.tasks import Task, generate, submit
from tinypolicy.templates import TEMPLATES

_CHUNK: Final = 500


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Demonstrations with `ids` int32 and `mask` bool, both [tokens]; episode i is `offsets[i]:offsets[i +
    1]`.
    """

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def save(self, path: Path) -> None:
        np.savez_compressed(path, ids=self.ids, mask=self.mask, offsets=self.offsets)

    @staticmethod
    def load(path: Path) -> Demonstrations:
        with np.load(path) as arrays:
            return Demonstrations(arrays["ids"], arrays["mask"], arrays["offsets"])


def episodes(tasks: Sequence[Task]) -> list[list[Message]]:
    """Run every task's solution in a folder of its own and return the conversations."""
    done: list[list[Message]] = []
    for start in range(0, len(tasks), _CHUNK):
        root = Path(tempfile.mkdtemp(prefix="tiny-policy-"))
        try:
            done += _run_chunk(root, tasks[start : start + _CHUNK])
        finally:
            shutil.rmtree(root)
    return done


def _run_chunk(root: Path, tasks: Sequence[Task]) -> list[list[Message]]:
    folders = [root / str(index) for index in range(len(tasks))]
    conversations = [[user(task.draft.prompt)] for task in tasks]
    for task, folder in zip(tasks, folders, strict=True):
        write_folder(folder, task.draft.files)
    for turn in range(max(len(task.draft.solution) for task in tasks)):
        at_work = [index for index, task in enumerate(tasks) if turn < len(task.draft.solution)]
        calls = [(index, tasks[index].draft.solution[turn]) for index in at_work]
        for index, call in calls:
            conversations[index].append(assistant(call))
        running = [(index, call) for index, call in calls if call.name != "submit"]
        results = run_round(root, [(folders[index], call) for index, call in running])
        for (index, _), result in zip(running, results, strict=True):
            conversations[index].append(tool(result))
    return conversations


def hasten(task: Task, rng: random.Random) -> Task:
    """Return the task with a solution that submits too early, as an impatient demonstrator does.

    Nothing follows the early submission, so no demonstration acts on an output that it has not seen.
    """
    calls = task.draft.solution
    useful = len(calls) - (calls[-1] == submit("done"))
    solution = (*calls[: rng.randrange(useful)], submit("done"))
    return replace(task, draft=replace(task.draft, solution=solution))


def make_demonstrations(
    seed: int, count: int, vocabulary: int, impatience: float
) -> tuple[Tokenizer, Demonstrations]:
    """Return `count` demonstrations of the training side, and the tokenizer trained on a part of them.

    A share of `impatience` submits too early. The policy learns this habit with the rest, which leaves it
    room to learn better from rewards: on every kind of task some samples fail.
    """
    template = chat_template()
    rng = random.Random(f"impatience/{seed}")
    tasks = [
        hasten(task, rng) if rng.random() < impatience else task
        for task in generate(TEMPLATES, seed, count, "train")
    ]
    texts = [template.render(messages=messages) for messages in episodes(tasks)]
    tokenizer = train_tokenizer(texts[: min(count, 8000)], vocabulary)
    start, end, role = (token_id(tokenizer, token) for token in (IM_START, IM_END, "assistant"))
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    masks = [assistant_mask(ids, start, end, role) for ids in encoded]
    return tokenizer, Demonstrations(
        np.concatenate([np.asarray(ids, dtype=np.int32) for ids in encoded]),
        np.concatenate([np.asarray(mask, dtype=bool) for mask in masks]),
        np.cumsum([0, *(len(ids) for ids in encoded)]),
    )
