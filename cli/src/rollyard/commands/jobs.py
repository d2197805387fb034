"""The commands that wait for jobs and pools, follow the events of jobs, and change jobs while they run."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rollyard import terminal
from rollyard.arguments import GROUP, RESOURCES, NamedObject, duration, job_name, kind_of, targets
from rollyard.connection import Server, connect, one_line_of, server_options
from rollyard.errors import CliError, InvalidInput, UsageProblem

if TYPE_CHECKING:
    from rollyard_client import Client, JobEvent
    from rollyard_crds import BackendPool, Condition, RolloutCounts, RolloutJob, Task

POLL_SECONDS: Final = 0.5
LONGEST_WAIT: Final = 7 * 86_400.0
"""The wait for which a negative timeout stands, in seconds, as with kubectl."""
MAX_PUSHED: Final = 1000
"""The largest number of tasks in one call."""
MAX_PUSHED_BYTES: Final = 4 << 20
"""The size from which the tasks of one call are enough."""


@click.command()
@click.argument("words", nargs=-1, metavar="KIND/NAME...")
@click.option(
    "--for",
    "goal",
    required=True,
    metavar="condition=NAME[=STATUS]|delete",
    help="The condition, such as condition=Succeeded (its STATUS: True), or that it is gone.",
)
@click.option(
    "--timeout",
    type=duration,
    default="30s",
    show_default=True,
    help="The longest wait; 0: look once; negative: a week.",
)
@server_options
def wait(words: tuple[str, ...], goal: str, timeout: float, server: Server) -> None:
    """Wait until jobs or pools have a condition, or are gone: `wait rj/NAME --for=condition=Succeeded`.

    The exit status is 1 if that does not come in time, or cannot come any more because the job has ended.
    Conditions of jobs: Admitted, Running, Degraded, Suspended, Finished, Succeeded, Failed. Of pools: Ready.
    """
    wanted = _goal(goal)
    end = time.monotonic() + (LONGEST_WAIT if timeout < 0 else timeout)
    named = targets("wait", words)
    with connect(*server) as client:
        for target in named:
            kind = _await(client, target, wanted, end)
            met = "condition met" if wanted is not None else "deleted"
            click.echo(f"{kind}.{GROUP}/{target.name} {met}")


def _goal(text: str) -> tuple[str, str] | None:
    """Return the condition and the status that `--for` names, or None for a deletion."""
    word, _, rest = text.partition("=")
    name, _, status = rest.partition("=")
    if text == "delete":
        return None
    if word == "condition" and name:
        return name, status or "True"
    likely = f"; did you mean condition={text}?" if text.isalpha() else ""
    if word == "jsonpath":
        likely = "; `rollyard get NAME -o json` prints the fields"
    raise UsageProblem(
        f"--for must be condition=NAME, condition=NAME=STATUS or delete (got {text!r}{likely})"
    )


def _await(client: Client, target: NamedObject, wanted: tuple[str, str] | None, end: float) -> str:
    """Wait for one object, and return its kind in lower case.

    Raises:
        CliError: It did not come in time, or it cannot come any more.
    """
    from rollyard_client.errors import NotFound
    from rollyard_client.finish import finished

    from rollyard.commands.resources import find
    from rollyard.jobs.running import answered

    uid: str | None = None
    kind = RESOURCES[target.kind or "rj"]
    while True:
        try:
            thing = answered(partial(find, client, target, client.namespace))
        except NotFound as error:
            if wanted is None:
                return kind
            raise CliError(one_line_of(error) if uid is None else f"{kind}/{target.name} is gone") from error
        kind = thing.kind.lower()
        if uid is not None and thing.metadata.uid != uid:
            if wanted is None:
                return kind
            raise CliError(f"{kind}/{target.name} was deleted, and there is another one of its name")
        uid = thing.metadata.uid
        message = (
            f"; it says: {thing.status.message}"
            if thing.kind == "RolloutJob" and thing.status.message
            else ""
        )
        if wanted is not None:
            if _has(thing.status.conditions, *wanted):
                return kind
            if thing.kind == "RolloutJob" and finished(thing):
                raise CliError(
                    f"{kind}/{target.name} has ended as {thing.status.phase}, so its condition {wanted[0]} "
                    f"does not become {wanted[1]}{message}",
                    reason="JobFailed",
                )
        left = end - time.monotonic()
        if left <= 0:
            raise CliError(_late(thing, wanted, message), reason="WaitTimeout")
        time.sleep(min(POLL_SECONDS, left))


def _has(conditions: Iterable[Condition], name: str, status: str) -> bool:
    return any(
        condition.type.lower() == name.lower() and condition.status.lower() == status.lower()
        for condition in conditions
    )


def _late(thing: RolloutJob | BackendPool, wanted: tuple[str, str] | None, message: str) -> str:
    target = f"{thing.kind.lower()}/{thing.metadata.name}"
    if wanted is None:
        return f"{target} is not gone in time{message}"
    states = ", ".join(f"{condition.type}={condition.status}" for condition in thing.status.conditions)
    return f"{target} has no {wanted[0]}={wanted[1]} in time; its conditions: {states or 'none yet'}{message}"


@click.command()
@click.argument("name", type=job_name)
@click.option("-f", "--follow", "following", is_flag=True, help="Then print what happens, to its end.")
@server_options
def events(name: str, following: bool, server: Server) -> None:
    """Show what has happened to a job, and with -f what happens to its rollouts.

    What has happened are the last changes of its conditions, and its counts. A followed event is a rollout
    that enters or leaves a stage, or ends.
    """
    from rollyard.jobs.running import leaving

    with connect(*server) as client:
        job = client.job(name, client.namespace)
        for line in _history(job):
            terminal.echo_line(line)
        if following:
            with leaving(name):
                _follow(client, name)
        else:
            terminal.echo_line(f"{_clock(datetime.now(UTC))}  {_counts(job.status.counts)}")


def _history(job: RolloutJob) -> Iterator[str]:
    """Yield a line for the creation of a job, and for the last change of each condition."""
    meta, status = job.metadata, job.status
    if meta.creation_timestamp is not None:
        yield f"{_clock(meta.creation_timestamp)}  created"
    first = min((condition.last_transition_time for condition in status.conditions), default=None)
    for condition in sorted(status.conditions, key=lambda each: each.last_transition_time):
        moment, is_true = condition.last_transition_time, condition.status == "True"
        if condition.type in ("Suspended", "Degraded") and not is_true and moment == first:
            continue  # It has been so from the beginning.
        message = f": {condition.message}" if condition.message else ""
        text = f"{condition.type} {condition.status} ({condition.reason}){message}"
        if condition.type == "Suspended":
            # Its reason is that of the latest status, which may have nothing to do with this change.
            text = "suspended" if is_true else "resumed"
        yield f"{_clock(moment)}  {text}"


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _counts(counts: RolloutCounts) -> str:
    stages = ", ".join(
        f"{stage} {here.active} active, {here.queued} queued"
        for stage, here in (("init", counts.init), ("run", counts.run), ("eval", counts.eval))
    )
    ended = f"{counts.succeeded} succeeded, {counts.failed} failed, {counts.cancelled} cancelled"
    return f"{counts.total} rollouts: {stages}; {ended}"


def _follow(client: Client, name: str) -> None:
    """Print events until the job has ended. A stream that breaks off is resumed where it was.

    Raises:
        CliError: The job was deleted.
        ServerUnavailable: The control plane has not answered for UNREACHABLE_SECONDS.
    """
    from rollyard_client.errors import NotFound, ServerUnavailable

    from rollyard.jobs.running import UNREACHABLE_SECONDS

    last, lost_at = "", None
    while True:
        try:
            for event in client.events(name, last_id=last, timeout=None, namespace=client.namespace):
                last, lost_at = event.id or last, None
                terminal.echo_line(f"{_clock(datetime.now(UTC))}  {_event_text(event)}")
                if event.name == "end":
                    return
        except NotFound as error:
            raise CliError(f"job {name!r} was deleted while it was followed") from error
        except ServerUnavailable:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > UNREACHABLE_SECONDS:
                raise
            time.sleep(POLL_SECONDS)


def _event_text(event: JobEvent) -> str:
    """Return an event as text. A policy may have written a part of it."""
    if event.counts is not None:
        return _counts(event.counts)
    if event.transition is None:
        return "the job has ended" if event.name == "end" else "some events are missing: they were too many"
    moved = event.transition
    reward = "" if moved.reward is None else f" reward {moved.reward:.4g}"
    reason = f" ({moved.reason})" if moved.reason else ""
    return f"{moved.rollout}  {moved.stage or ''} {moved.status}{reward}{reason}"


@click.command()
@click.argument("words", nargs=-1, metavar="NAME...")
@server_options
def suspend(words: tuple[str, ...], server: Server) -> int:
    """Suspend jobs: their workers are drained, and nothing starts until `rollyard resume`."""
    return _suspended("suspend", words, server, True)


@click.command()
@click.argument("words", nargs=-1, metavar="NAME...")
@server_options
def resume(words: tuple[str, ...], server: Server) -> int:
    """Let suspended jobs continue."""
    return _suspended("resume", words, server, False)


def _suspended(command: str, words: tuple[str, ...], server: Server, suspended: bool) -> int:
    from rollyard_client.finish import finished

    from rollyard.commands.resources import for_each

    if words and "/" not in words[0] and kind_of(words[0]) is None:
        words = ("rj", *words)
    named = targets(command, words)
    for target in named:
        if target.kind == "bp":
            flag = "--pause abort" if suspended else "--resume"
            raise click.UsageError(f"a pool: use `rollyard weights {target.name} {flag}`")

    def one(client: Client, target: NamedObject) -> None:
        job = client.job(target.name, client.namespace)
        if finished(job):
            raise InvalidInput(f"it has ended already ({job.status.phase})")
        if job.spec.suspend == suspended:
            click.echo(f"rolloutjob/{target.name} unchanged")
            return
        client.update(target.name, suspend=suspended, namespace=client.namespace)
        click.echo(f"rolloutjob/{target.name} {'suspended' if suspended else 'resumed'}")

    with connect(*server) as client:
        return for_each(client, ((f"rolloutjob/{each.name}", each) for each in named), one)


@click.command()
@click.argument("name", metavar="JOB", type=job_name)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@server_options
def push(name: str, path: Path, server: Server) -> None:
    """Push the tasks of FILE (- for standard input) to a stream, a job with `tasks: {stream: true}`.

    A task whose id the job has already changes nothing, so a push that failed can be repeated.
    """
    from rollyard_client.errors import RollyardError
    from rollyard_tasks.task_list import TaskListError

    from rollyard.jobs.manifests import STANDARD_INPUT, read_tasks

    shown = "standard input" if path == STANDARD_INPUT else path
    accepted = repeated = 0
    with connect(*server) as client, _on_disk(path) as file:
        try:
            tasks = read_tasks(file)
        except TaskListError as error:
            raise InvalidInput("; ".join(f"{shown}: {problem}" for problem in error.problems)) from error
        for batch in _batches(tasks):
            try:
                answer = client.push_tasks(name, batch, client.namespace)
            except RollyardError as error:
                if not accepted + repeated:
                    raise
                raise CliError(
                    f"{one_line_of(error)}; {accepted} of {len(tasks)} tasks were accepted before, and a "
                    "repeated push skips them"
                ) from error
            accepted += answer.accepted
            repeated += answer.repeated
    known = f", {repeated} were there already" if repeated else ""
    noun = "task" if accepted == 1 else "tasks"
    click.echo(f"rolloutjob/{name}: {accepted} {noun} accepted{known}")


@contextmanager
def _on_disk(path: Path) -> Iterator[Path]:
    """Provide a file with the content of standard input if it is meant, and else the file itself."""
    from rollyard_tasks.task_file import MAX_FILE_BYTES

    from rollyard.jobs.manifests import STANDARD_INPUT

    if path != STANDARD_INPUT:
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        size = 0
        while data := sys.stdin.buffer.read(1 << 20):
            size += len(data)
            if size > MAX_FILE_BYTES:
                raise InvalidInput(f"standard input: holds more than {MAX_FILE_BYTES} bytes")
            file.write(data)
        file.flush()
        yield Path(file.name)


def _batches(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Yield the tasks of each call, which are a few large or many small ones."""
    batch: list[Task] = []
    size = 0
    for task in tasks:
        batch.append(task)
        size += len(task.model_dump_json(exclude_none=True))
        if len(batch) >= MAX_PUSHED or size >= MAX_PUSHED_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@click.command()
@click.argument("name", metavar="JOB", type=job_name)
@server_options
def close(name: str, server: Server) -> None:
    """Close a stream: it takes no more tasks, and ends with those that it has."""
    with connect(*server) as client:
        job = client.job(name, client.namespace)
        if not job.spec.tasks.stream:
            raise InvalidInput(f"rolloutjob/{name} is not a stream: `rollyard cancel {name}` ends it")
        job = client.close_stream(name, client.namespace)
    total = job.status.counts.total
    click.echo(f"rolloutjob/{name} closed ({total} rollouts)")
