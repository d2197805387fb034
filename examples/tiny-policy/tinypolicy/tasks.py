"""The task record, and what all task templates share: names, files, test scripts, the content split."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tinypolicy.words import EXTENSIONS, WORDS

Side = Literal["train", "held-out"]

#: One file text in four belongs to the held-out side, by its hash, so training and held-out tasks share no
#: file.
_HELD_OUT_BELOW: Final = 64
_MAX_DRAWS: Final = 1_000_000


class TaskGenerationError(ValueError):
    """No task could be drawn for the side that was asked for."""

    reason: Final = "TaskGenerationFailed"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of the reference solution, which is one assistant turn."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    """A task without an id, as a template draws it."""

    prompt: str
    files: Mapping[str, str]
    solution: tuple[ToolCall, ...]
    test_script: str


@dataclass(frozen=True, slots=True)
class Task:
    """A shell task: a folder, a prompt, a reference solution and the script that decides the reward."""

    id: str
    family: str
    template: str
    draft: Draft

    def record(self) -> dict[str, object]:
        """Return the task as one JSON object, in the format of the `shell` handler."""
        return {
            "id": self.id,
            "prompt": self.draft.prompt,
            "sandbox": {"files": dict(self.draft.files)},
            "test_script": self.draft.test_script,
            "solution": [{"name": c.name, "arguments": dict(c.arguments)} for c in self.draft.solution],
            "metadata": {"family": self.family, "template": self.template},
        }


Template = Callable[[random.Random], Draft]


def bash(command: str) -> ToolCall:
    return ToolCall("bash", {"command": command})


def submit(answer: str) -> ToolCall:
    return ToolCall("submit", {"answer": answer})


def replace(path: str, old: str, new: str) -> ToolCall:
    return ToolCall("edit", {"command": "str_replace", "path": path, "old_str": old, "new_str": new})


def names(rng: random.Random, count: int) -> list[str]:
    """Return `count` different words."""
    return rng.sample(WORDS, count)


def extension(rng: random.Random) -> str:
    return rng.choice(EXTENSIONS)


def number(rng: random.Random) -> str:
    """Return a number of two to four digits."""
    return str(rng.randrange(10, rng.choice((100, 1000, 10000))))


def pairs(rng: random.Random, words: Sequence[str], count: int, separator: str = " ") -> list[str]:
    """Return `count` lines of one of `words` and a number each."""
    return [f"{rng.choice(words)}{separator}{number(rng)}" for _ in range(count)]


def text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def answer_test(expected: str) -> str:
    """Return a test script that checks whether the submitted answer is `expected`, and prints both."""
    return (
        f"printf 'answer: %s\\nexpected: %s\\n' \"$ROLLYARD_ANSWER\" '{expected}'\n"
        f"[ \"$ROLLYARD_ANSWER\" = '{expected}' ]\n"
    )


def files_test(final: Mapping[str, str], absent: Sequence[str] = ()) -> str:
    """Return a test script: the files of `final` hold exactly these texts, and those in `absent` are gone.

    It prints a line for each of them.
    """
    gone = "".join(f"[ ! -e {path} ] || {{ echo '{path}: is still there'; exit 1; }}\n" for path in absent)
    sums = text([f"{hashlib.sha256(final[p].encode()).hexdigest()}  {p}" for p in sorted(final)])
    return f"{gone}sha256sum -c <<'EOF'\n{sums}EOF\n"


def side_of(file_text: str) -> Side:
    """Return the side that a file text belongs to, by its hash."""
    first = hashlib.sha256(file_text.encode()).digest()[0]
    return "held-out" if first < _HELD_OUT_BELOW else "train"


def draw(template: Template, rng: random.Random, side: Side) -> Draft:
    """Draw from `template` until every file that is not empty belongs to `side`.

    Raises `TaskGenerationError` if none of a million draws does: the template's files vary too little.
    """
    for _ in range(_MAX_DRAWS):
        draft = template(rng)
        if all(side_of(file_text) == side for file_text in draft.files.values() if file_text):
            return draft
    raise TaskGenerationError(
        f"{template.__name__}: no {side} task in {_MAX_DRAWS} draws; vary its files more"
    )


def generate(
    templates: Mapping[str, Mapping[str, Template]], seed: int, count: int, side: Side
) -> list[Task]:
    """Return `count` tasks, the templates in turn, equal for equal arguments. Ids count per family."""
    flat = [(family, name, t) for family, members in templates.items() for name, t in members.items()]
    counters = dict.fromkeys(templates, 0)
    tasks: list[Task] = []
    for index in range(count):
        family, name, template = flat[index % len(flat)]
        counters[family] += 1
        rng = random.Random(f"{side}/{seed}/{name}/{index}")
        draft = draw(template, rng, side)
        tasks.append(Task(f"{family}-{counters[family]:04d}", family, name, draft))
    return tasks


def json_lines(tasks: Sequence[Task]) -> str:
    return text([json.dumps(task.record(), ensure_ascii=False) for task in tasks])
