"""The reading, grading and showing of answers, a few at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import click
from pydantic import BeforeValidator, Field, ValidationError
from rich.text import Text
from rollyard_crds.base import Model
from rollyard_crds.reading.manifest import describe
from rollyard_crds.rolloutjob import TaskSource
from rollyard_crds.task import Choice, Message, NumericAnswer, Task
from rollyard_crds.trajectory import Trajectory
from rollyard_process.log_text import one_line, sentence
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.task_list import TaskListError

from rollyard import terminal
from rollyard.errors import CliError, InvalidInput, LookupFailed
from rollyard.jobs.evaluation import (
    answer_spec,
    answered,
    count_bounded,
    open_rescorer,
    same_reward,
    shown_reward,
)
from rollyard.jobs.manifests import extensions_with, read_tasks, text_file

if TYPE_CHECKING:
    from rollyard_pipeline.stages.rescoring import Rescorer

CHUNK: Final = 8
"""The number of answers that are graded at the same time."""
MAX_ANSWER: Final = 1 << 20
"""The largest number of characters of an answer, as for any message."""
MAX_LINE: Final = 8 << 20
"""The largest number of characters of a line of a file with answers."""
MAX_REWARDS: Final = 10
"""The largest number of different rewards that a summary counts one by one."""
MAX_SHOWN_ID: Final = 32
"""The largest number of characters of a pair's name on a terminal, which shows the reward after it."""
MAX_COMPARED_IDS: Final = 10_000
"""The largest number of task ids that are compared with an unknown one."""
NO_TASK: Final = "grade"
"""The id of the task that is made from a pair. The user did not choose it, so no message shows it."""
OPTIONS: Final = {
    "answer": "ANSWER",
    "key": "--key",
    "choices": "--choice",
    "numeric": "--unit and --tolerance",
    "numeric.unit": "--unit",
    "numeric.relative": "--tolerance",
    "task": "--task",
}
"""The options that give the fields of a pair on the command line."""
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


def _text_of_integer(value: Any) -> Any:
    # A boolean is also an int, but its text is not what the file says.
    return str(value) if type(value) is int else value


class Pair(Model):
    """An answer and what it is compared with: one line of a file."""

    answer: Annotated[str, Field(max_length=MAX_ANSWER)]
    """What the policy says."""
    key: Annotated[str, Field(max_length=1 << 16), BeforeValidator(_text_of_integer)] | None = None
    """The right answer. An integer stands for its text."""
    choices: Annotated[list[Choice], Field(max_length=26)] = Field(default_factory=list)
    """The choices, of which the key is a letter."""
    numeric: NumericAnswer | None = None
    """Given if the key is a number."""
    task: str | None = None
    """The id of a task of `--tasks`, instead of `key`, `choices` and `numeric`."""
    expect: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The expected reward."""
    id: Annotated[str, Field(max_length=128), BeforeValidator(_text_of_integer)] | None = None
    """The name of the pair in the output, instead of its line. An integer stands for its text."""


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line of a file that does not hold a pair."""

    id: str
    """Its name in the output."""
    message: str
    """Why it is refused."""
    task: None = None
    expect: None = None


def single(
    answer: str, key: str | None, choices: tuple[str, ...], numeric: dict[str, Any] | None, task: str | None
) -> Iterator[Pair | RefusedLine]:
    """Yield the pair that the command line gives.

    Raises:
        InvalidInput: The answer or an option is refused. The message names it.
    """
    if answer == "-":
        try:
            with _opened(Path("-")) as file:
                answer = file.read(MAX_ANSWER + 1)
        except UnicodeDecodeError as error:
            raise InvalidInput(f"standard input: not UTF-8 text ({error})") from error
    numeric_fields = {name: value for name, value in (numeric or {}).items() if value is not None}
    document = {"answer": answer, "key": key, "choices": list(choices), "task": task}
    try:
        yield _pair(document if numeric is None else {**document, "numeric": numeric_fields})
    except InvalidInput as error:
        raise InvalidInput(_with_options(str(error))) from error


def pairs_of(path: Path) -> Iterator[Pair | RefusedLine]:
    """Yield what the lines of a file hold, which has JSON lines and may be compressed (`.gz`).

    Args:
        path: The file; `-` stands for standard input.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: The file is not text, or has a line that is too long. The message names it.
    """
    name = "standard input" if path == Path("-") else str(path)
    try:
        with _opened(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), 1):
                if len(line) > MAX_LINE:
                    raise InvalidInput(f"{name}: line {number}: longer than {MAX_LINE >> 20} MiB")
                if not line.strip():
                    continue
                try:
                    pair = _from_line(line)
                except InvalidInput as error:
                    yield RefusedLine(f"line {number}", str(error))
                else:
                    pair.id = pair.id or f"line {number}"
                    yield pair
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise LookupFailed(f"{name}: {error.strerror or error}") from error


def _opened(path: Path) -> AbstractContextManager[IO[str]]:
    """Open a text file, which may begin with a byte order mark; `-` stands for standard input."""
    if path == Path("-"):
        return click.open_file("-", encoding="utf-8-sig")
    return text_file(path, "utf-8-sig")


def _from_line(line: str) -> Pair:
    try:
        document = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidInput(f"must be a JSON object, not {type(document).__name__}")
    return _pair(document)


def _pair(document: dict[str, Any]) -> Pair:
    try:
        return Pair.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(describe(error, model=Pair)[0]) from error


def _with_options(message: str) -> str:
    """Turn a message about a field of a pair into one about the option that gives it."""
    field, colon, rest = message.partition(":")
    option = OPTIONS.get(field.partition("[")[0])
    rest = re.sub(r"'(choices|numeric\.unit)'", lambda named: OPTIONS[named[1]], rest)
    return message if option is None else f"{option}{colon}{rest}"


@dataclass(slots=True)
class GradeCounts:
    """The results of a file of pairs."""

    rewards: Counter[str] = field(default_factory=Counter)
    differing: int = 0
    """The number of rewards that are not the expected ones."""
    failed: int = 0
    """The number of answers that could not be graded, so that they have no reward."""

    @property
    def answers(self) -> int:
        """The number of all answers."""
        return self.rewards.total() + self.failed

    def add(self, pair: Pair | RefusedLine, record: Trajectory) -> bool:
        """Count an answer, and return whether its reward is not the expected one."""
        if record.reward is None:
            self.failed += 1
            return False
        shown = shown_reward(record.reward)
        count_bounded(self.rewards, shown, MAX_REWARDS, "others")
        differs = pair.expect is not None and not same_reward(record.reward, pair.expect)
        self.differing += differs
        return differs

    def __str__(self) -> str:
        rewards = (f"reward {shown}: {count}" for shown, count in self.rewards.most_common())
        answers = "1 answer" if self.answers == 1 else f"{self.answers} answers"
        failed = (f"not graded: {self.failed}",) if self.failed else ()
        return f"{answers}; {', '.join((*rewards, *failed))}"

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
    pairs: Iterator[Pair | RefusedLine],
    handler: str,
    tasks_file: Path | None,
    task_format: str | None,
    sandbox: str,
    plugins: Sequence[Path] = (),
    *,
    summed: bool,
    as_json: bool,
) -> None:
    """Grade pairs, and print each of them as soon as those before it are graded.

    Args:
        pairs: The pairs.
        handler: The name of the handler.
        tasks_file: The tasks that pairs name. None stands for the keys of the pairs.
        task_format: The format of the tasks.
        sandbox: The kind of the sandboxes, for a handler that needs some.
        plugins: Files with further handlers.
        summed: Whether the pairs are those of a file: there is a line for each of them, even for one that is
            refused, and a summary, even after an error or Ctrl-C.
        as_json: Whether each pair is shown as a JSON object, without a summary.

    Raises:
        LookupFailed: There is no such file.
        InvalidInput: The handler cannot grade answers here, the file cannot be read, or the pair of the
            command line or its task is refused.
        CliError: An answer could not be graded, or a reward is not the expected one.
    """
    tasks = {} if tasks_file is None else _tasks(tasks_file, task_format)
    spec = answer_spec(handler)
    show = _as_json if as_json else _as_line if summed else _in_full
    counts = GradeCounts()
    extensions = extensions_with(plugins)
    opened = open_rescorer("grade", handler, spec, None, "rollyard grade", sandbox, extensions)
    with opened as (rescorer, runner):
        try:
            while chunk := list(itertools.islice(pairs, CHUNK)):
                records = [_trajectory(pair, counts.answers + at) for at, pair in enumerate(chunk, 1)]
                records = _graded(chunk, records, tasks, rescorer, runner, from_file=summed)
                for pair, record in zip(chunk, records, strict=True):
                    show(pair, record, counts.add(pair, record))
        except (CliError, KeyboardInterrupt) as error:
            if summed and counts.answers:
                click.echo(str(counts), err=as_json or isinstance(error, KeyboardInterrupt))
            raise
    if not counts.answers:
        raise InvalidInput("there is nothing to grade: give at least one line")
    if summed and not as_json:
        click.echo(str(counts))
    counts.check()


def _graded(
    pairs: Sequence[Pair | RefusedLine],
    records: Sequence[Trajectory],
    tasks: Mapping[str, Task],
    rescorer: Rescorer,
    runner: asyncio.Runner,
    *,
    from_file: bool,
) -> list[Trajectory]:
    """Return the records of pairs with their rewards, in their order. A line that is refused has failed.

    Raises:
        InvalidInput: The pair of the command line or its task is refused.
    """
    results: dict[int, Trajectory] = {}
    accepted: dict[int, tuple[Trajectory, Task]] = {}
    for at, (pair, record) in enumerate(zip(pairs, records, strict=True)):
        try:
            if isinstance(pair, RefusedLine):
                raise InvalidInput(pair.message)
            task = _task(pair, tasks, rescorer)
        except InvalidInput as error:
            if not from_file:
                raise InvalidInput(_with_options(str(error))) from error
            results[at] = _refused(record, str(error))
        else:
            messages = [*task.chat(), *record.messages]
            accepted[at] = record.model_copy(update={"task_id": task.id, "messages": messages}), task
    graded = runner.run(rescorer.rescored(list(accepted.values()), datetime.now(UTC)))
    results |= {at: _worded(record, from_file) for at, record in zip(accepted, graded, strict=True)}
    return [results[at] for at in range(len(pairs))]


def _tasks(path: Path, task_format: str | None) -> dict[str, Task]:
    try:
        return {task.id: task for task in read_tasks(path, TaskSource(url=path.name, format=task_format))}
    except ValidationError as error:
        raise InvalidInput(describe(error)[0]) from error
    except TaskListError as error:
        raise InvalidInput(f"{path}: {error.problems[0]}") from error


def _task(pair: Pair, tasks: Mapping[str, Task], rescorer: Rescorer) -> Task:
    """Return the task of a pair, which the handler accepts.

    Raises:
        InvalidInput: There is no task, or the handler refuses it. The message begins with a field of the
            pair.
    """
    from rollyard_pipeline.errors import PipelineError

    if tasks:
        task = _named_task(pair, tasks)
    elif pair.task is not None:
        raise InvalidInput("task: needs --tasks")
    else:
        task = Task(id=NO_TASK, prompt="?", answer=pair.key, choices=pair.choices, numeric=pair.numeric)
    try:
        problems = rescorer.problems(task)
    except PipelineError as error:
        raise InvalidInput(str(error).replace(f"the task '{NO_TASK}'", "the key", 1)) from error
    if problems:
        raise InvalidInput(f"task {task.id!r}: {problems[0]}" if tasks else _of_pair(problems[0]))
    return task


def _named_task(pair: Pair, tasks: Mapping[str, Task]) -> Task:
    if pair.key is not None or pair.choices or pair.numeric is not None:
        raise InvalidInput("key, choices and numeric: cannot be given beside --tasks")
    name = next(iter(tasks)) if pair.task is None and len(tasks) == 1 else pair.task
    if name is None:
        raise InvalidInput(f"task: required, because --tasks has {len(tasks)} tasks")
    # Formats escape characters in the names that rows have; some do so between slashes.
    spellings = (name, task_id(name), task_id(*name.split("/")))
    for spelling in spellings:
        if spelling in tasks:
            return tasks[spelling]
    names = list(itertools.islice(tasks, MAX_COMPARED_IDS))
    similar = [match for spelling in spellings for match in get_close_matches(spelling, names, n=3)]
    shown = ", ".join(map(repr, list(dict.fromkeys(similar))[:3] or names[:1]))
    raise InvalidInput(f"task: --tasks has no {name!r}; there is {shown}")


def _of_pair(problem: str) -> str:
    return re.sub("^answer:", "key:", problem)


def _worded(record: Trajectory, from_file: bool) -> Trajectory:
    """Return the record with a reason and a message that say what is wrong with the answer or its key."""
    if record.reward is not None:
        return record
    if record.reason == "RescoreRefused":
        return _refused(record, record.message.removeprefix("RescoreRefused: "))
    if record.task_id != NO_TASK:
        return record
    before, _, problem = record.message.partition(f"task '{NO_TASK}': ")
    problem = _of_pair(problem) if from_file else _with_options(_of_pair(problem))
    return record.model_copy(update={"message": f"{before}{problem}"})


def _refused(record: Trajectory, why: str) -> Trajectory:
    return record.model_copy(update={"status": "failed", "reason": InvalidInput.reason, "message": why})


def _trajectory(pair: Pair | RefusedLine, number: int) -> Trajectory:
    """Return the record of a rollout in which the policy gave the answer, and nothing else."""
    messages = [Message(role="assistant", content=pair.answer)] if isinstance(pair, Pair) else []
    return answered("grade", number, NO_TASK, messages)


def _as_json(pair: Pair | RefusedLine, record: Trajectory, differs: bool) -> None:
    shown = {"id": pair.id, "task": pair.task, "expect": pair.expect}
    recorded = record.model_dump(mode="json", include=set(RECORDED))
    click.echo(json.dumps({name: value for name, value in shown.items() if value is not None} | recorded))


def _in_full(pair: Pair | RefusedLine, record: Trajectory, differs: bool) -> None:
    if record.reward is None:
        raise CliError(_verdict(record))
    console = terminal.console()
    console.print(Text(_verdict(record), style="bold"), soft_wrap=True)
    # The text may come from the answer, and none of its lines may look like the lines here.
    for line in record.reward_output.splitlines():
        console.print(Text(f"  │ {line}"), soft_wrap=True)
    if record.reward_components:
        parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_components.items())
        console.print(Text(f"reward components: {parts}", style="dim"), soft_wrap=True)


def _as_line(pair: Pair | RefusedLine, record: Trajectory, differs: bool) -> None:
    """Print a pair as one line, which is cut to the width of a terminal and complete in a pipe.

    Handlers show last where the reward comes from, so it is first here, where no terminal cuts it.
    """
    console = terminal.console()
    expected = f", not {pair.expect:g}" if differs else ""
    *others, last = [line for line in record.reward_output.splitlines() if line.strip()] or [""]
    name = pair.id or ""
    if console.is_terminal and len(name) > MAX_SHOWN_ID:
        name = f"{name[: MAX_SHOWN_ID - 1]}…"
    verdict = f"{name}: {_verdict(record)}{expected}{': ' if last else ''}{last}"
    text = Text(one_line(" | ".join((verdict, *others))))
    text.stylize("yellow" if record.reward is None else "red" if differs else "")
    if console.is_terminal:
        console.print(text, no_wrap=True, overflow="ellipsis")
    else:
        console.print(text, soft_wrap=True)


def _verdict(record: Trajectory) -> str:
    if record.reward is None:
        return f"not graded: {sentence(record.message)}"
    return f"reward {record.reward:g}" + (f" ({record.reward_reason})" if record.reward_reason else "")
