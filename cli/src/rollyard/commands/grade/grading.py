"""Answers and their keys are read, graded a few at a time, and shown."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Annotated, Any, Final

import click
from pydantic import Field, ValidationError
from rich.text import Text
from rollyard_crds.base import Model
from rollyard_crds.reading.manifest import describe
from rollyard_crds.reading.task_list import MAX_LINE_BYTES, TaskListError
from rollyard_crds.rolloutjob import RolloutJobSpec, TaskSource
from rollyard_crds.security.log_text import one_line
from rollyard_crds.task import Choice, Message, NumericAnswer, Task
from rollyard_crds.trajectory import Trajectory

from rollyard import terminal
from rollyard.errors import CliError, InvalidInput, LookupFailed
from rollyard.jobs.evaluation import open_rescorer, same_reward, shown_reward
from rollyard.jobs.manifests import read_tasks, text_file

CHUNK: Final = 8
"""The number of answers that are graded at the same time."""
MAX_ANSWER: Final = 1 << 20
"""The largest number of characters of an answer, as of any message."""
MAX_REWARDS: Final = 10
"""The number of different rewards that a summary counts one by one."""
RECORDED: Final = (
    "status",
    "reason",
    "message",
    "reward",
    "reward_reason",
    "reward_components",
    "reward_output",
)
"""The fields of a trajectory that `-o json` shows."""


class Pair(Model):
    """An answer and what it is compared with: one line of a file."""

    answer: Annotated[str, Field(max_length=MAX_ANSWER)]
    """What the policy says."""
    key: Annotated[str, Field(max_length=1 << 16)] | None = None
    """The right answer."""
    choices: Annotated[list[Choice], Field(max_length=26)] = Field(default_factory=list)
    """The choices, of which the key is the letter."""
    numeric: NumericAnswer | None = None
    """Says that the key is a number."""
    task: str | None = None
    """The id of a task of `--tasks`, instead of `key`, `choices` and `numeric`."""
    expect: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The reward that is right."""
    id: Annotated[str, Field(max_length=128)] | None = None
    """What names the pair in the output, instead of its line."""


def single(
    answer: str, key: str | None, choices: tuple[str, ...], numeric: dict[str, Any] | None, task: str | None
) -> Iterator[tuple[str, Pair]]:
    """Yield the pair that the command line gives, with what names it in messages, which is nothing.

    Raises:
        InvalidInput: The answer or an option is refused. The message names the field of the pair.
    """
    if answer == "-":
        try:
            with _opened(Path("-")) as file:
                answer = file.read(MAX_ANSWER + 1)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"standard input: not UTF-8 text ({error})") from error
    given = {name: value for name, value in (numeric or {}).items() if value is not None}
    document = {"answer": answer, "key": key, "choices": list(choices), "task": task}
    yield "", _pair(document if numeric is None else {**document, "numeric": given}, "")


def pairs_of(path: Path) -> Iterator[tuple[str, Pair]]:
    """Yield the pairs of a file with JSON lines, which may be compressed (`.gz`), each with its place.

    Args:
        path: The file; `-` stands for standard input.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: A line is refused. The message names it and the field.
    """
    name = "standard input" if path == Path("-") else str(path)
    try:
        with _opened(path) as file:
            for number, line in enumerate(_lines(file), 1):
                place = f"{name}: line {number}: "
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidInput(f"{place}longer than {MAX_LINE_BYTES >> 20} MiB")
                if line.strip():
                    pair = _from_line(line, place)
                    pair.id = pair.id or f"line {number}"
                    yield place, pair
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise LookupFailed(f"{name}: {error.strerror or error}") from error


def _opened(path: Path) -> AbstractContextManager[IO[str]]:
    """Open a text, which editors may have begun with a byte order mark; `-` stands for standard input."""
    if path == Path("-"):
        return click.open_file("-", encoding="utf-8-sig")
    return text_file(path, "utf-8-sig")


def _lines(file: IO[str]) -> Iterator[str]:
    return iter(lambda: file.readline(MAX_LINE_BYTES + 1), "")


def _from_line(line: str, place: str) -> Pair:
    try:
        document = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{place}not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput(f"{place}must be a JSON object, not {type(document).__name__}")
    return _pair(document, place)


def _pair(document: dict[str, Any], place: str) -> Pair:
    try:
        return Pair.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(f"{place}{describe(error, model=Pair)[0]}") from error


@dataclass(slots=True)
class GradeCounts:
    """What a file of pairs came to."""

    rewards: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    """The number of rewards that are not the expected ones."""
    failed: int = 0
    """The number of answers that could not be graded, so that they have no reward."""

    @property
    def answers(self) -> int:
        """The number of all answers."""
        return self.rewards.total() + self.failed

    def add(self, pair: Pair, one: Trajectory) -> bool:
        """Count an answer, and return whether its reward is not the expected one."""
        if one.reward is None:
            self.failed += 1
            return False
        shown = shown_reward(one.reward)
        known = shown in self.rewards or len(self.rewards) < MAX_REWARDS
        self.rewards[shown if known else "others"] += 1
        differs = pair.expect is not None and not same_reward(one.reward, pair.expect)
        self.differing += differs
        return differs

    def __str__(self) -> str:
        rewards = (f"reward {shown}: {count}" for shown, count in self.rewards.most_common())
        return f"{self.answers} answers; {', '.join(rewards) or 'no reward'}"

    def check(self) -> None:
        """Check that all answers have a reward, and the expected one.

        Raises:
            CliError: An answer could not be graded, or a reward is not the expected one.
        """
        faults = []
        if self.differing:
            faults.append(f"not as expected: {self.differing} of {self.rewards.total()} rewards")
        if self.failed:
            faults.append(f"not graded, for the reasons above: {self.failed}")
        if faults:
            raise CliError("; ".join(faults))


def grade(
    pairs: Iterator[tuple[str, Pair]],
    handler: str,
    tasks_file: Path | None,
    task_format: str | None,
    sandbox: str,
    *,
    summed: bool,
    as_json: bool,
) -> None:
    """Grade pairs, and print each of them as soon as those before it are graded.

    Args:
        pairs: The pairs, each with its place at the beginning of messages about it.
        handler: The name of the handler.
        tasks_file: The tasks that pairs name. None stands for the keys of the pairs.
        task_format: The format of the tasks.
        sandbox: The kind of the sandboxes, for a handler that needs some.
        summed: Whether there is a line for each pair, and a summary.
        as_json: Whether each pair is shown as a JSON object.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: The handler cannot grade answers here, or a pair or its task is refused.
        CliError: An answer could not be graded, or a reward is not the expected one.
    """
    tasks = {} if tasks_file is None else _tasks(tasks_file, task_format)
    spec = _spec(handler)
    show = _as_json if as_json else _as_line if summed else _in_full
    counts = GradeCounts()
    with open_rescorer("grade", handler, spec, None, "rollyard grade", sandbox) as (rescorer, runner):
        numbers = itertools.count(1)
        while some := list(itertools.islice(pairs, CHUNK)):
            tasks_of = [_task(pair, place, tasks, rescorer.problems) for place, pair in some]
            kept = [
                (_trajectory(pair, task, next(numbers)), task)
                for (_, pair), task in zip(some, tasks_of, strict=True)
            ]
            graded = runner.run(rescorer.rescored(kept, datetime.now(UTC)))
            for (_, pair), one in zip(some, graded, strict=True):
                show(pair, one, counts.add(pair, one))
    if not counts.answers:
        raise InvalidInput("there is nothing to grade: give at least one line")
    if summed and not as_json:
        click.echo(str(counts))
    counts.check()


def _spec(handler: str) -> RolloutJobSpec:
    """Return the spec of a job with this handler, in which the policy's answer is all that there is.

    Raises:
        InvalidInput: No handler can have this name, or it gives no reward of its own.
    """
    fields = {"tasks": {"stream": True}, "agent": {"type": "oracle"}, "sandbox": {"warm": 0}}
    try:
        return RolloutJobSpec.model_validate({**fields, "handler": handler})
    except ValidationError as error:
        raise InvalidInput(describe(error)[0].removeprefix("manifest: ")) from error


def _tasks(path: Path, task_format: str | None) -> dict[str, Task]:
    try:
        return {task.id: task for task in read_tasks(path, TaskSource(url=path.name, format=task_format))}
    except ValidationError as error:
        raise InvalidInput(describe(error)[0]) from error
    except TaskListError as error:
        raise InvalidInput(f"{path}: {error.problems[0]}") from error


def _task(pair: Pair, place: str, tasks: Mapping[str, Task], problems: Callable[[Task], list[str]]) -> Task:
    """Return the task of a pair, which the handler accepts.

    Raises:
        InvalidInput: There is none, or the handler refuses it. The message begins with the place.
    """
    if tasks:
        if pair.key is not None or pair.choices or pair.numeric is not None:
            raise InvalidInput(f"{place}key, choices and numeric: cannot be given beside --tasks")
        name = next(iter(tasks)) if pair.task is None and len(tasks) == 1 else pair.task
        if name is None:
            raise InvalidInput(f"{place}task: required, because --tasks has {len(tasks)} tasks")
        task = tasks.get(name)
        if task is None:
            near = get_close_matches(name, tasks, n=1) or [next(iter(tasks))]
            raise InvalidInput(f"{place}task: --tasks has no {name!r}; there is {near[0]!r}")
    elif pair.task is not None:
        raise InvalidInput(f"{place}task: needs --tasks")
    else:
        task = Task(id="grade", prompt="?", answer=pair.key, choices=pair.choices, numeric=pair.numeric)
    found = problems(task)
    if found:
        field = found[0] if tasks else re.sub("^answer:", "key:", found[0])
        raise InvalidInput(f"{place}{f'task {task.id!r}: ' if tasks else ''}{field}")
    return task


def _trajectory(pair: Pair, task: Task, number: int) -> Trajectory:
    """Return the record of a rollout in which the policy has said the answer, and nothing else."""
    return Trajectory(
        id=f"grade-{number}",
        job="grade",
        task_id=task.id,
        group_id="grade",
        sample_index=0,
        messages=[*task.chat(), Message(role="assistant", content=pair.answer)],
    )


def _as_json(pair: Pair, one: Trajectory, differs: bool) -> None:
    shown = {"id": pair.id, "task": pair.task, "expect": pair.expect}
    recorded = one.model_dump(mode="json", include=set(RECORDED))
    click.echo(json.dumps({name: value for name, value in shown.items() if value is not None} | recorded))


def _in_full(pair: Pair, one: Trajectory, differs: bool) -> None:
    if one.reward is None:
        raise CliError(_verdict(one))
    console = terminal.console()
    console.print(Text(_verdict(one), style="bold"), soft_wrap=True)
    # The answer may have written it, and no line of it may look like one of these.
    for line in one.reward_output.splitlines():
        console.print(Text(f"  │ {line}"), soft_wrap=True)
    if one.reward_components:
        parts = ", ".join(f"{name} {value:g}" for name, value in one.reward_components.items())
        console.print(Text(f"reward components: {parts}", style="dim"), soft_wrap=True)


def _as_line(pair: Pair, one: Trajectory, differs: bool) -> None:
    """Print a pair as one line, which a terminal gets as wide as it is and a pipe in full."""
    console = terminal.console()
    wanted = f", not {pair.expect:g}" if differs else ""
    shown = (line for line in one.reward_output.splitlines() if line.strip())
    text = Text(one_line(" | ".join((f"{pair.id}: {_verdict(one)}{wanted}", *shown))))
    text.stylize("yellow" if one.reward is None else "red" if differs else "")
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis")
    else:
        console.print(text, soft_wrap=True)


def _verdict(one: Trajectory) -> str:
    if one.reward is None:
        return f"not graded: {one_line(one.message)}"
    return f"reward {one.reward:g}" + (f" ({one.reward_reason})" if one.reward_reason else "")
