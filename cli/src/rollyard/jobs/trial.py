"""One task, played once on this machine or by a pool, and shown turn by turn."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard_crds import RolloutJob, Task
from rollyard_crds.rolloutjob import BackendRef, TaskSource
from rollyard_drivers.host.home import Home
from rollyard_drivers.host.log_file import last_lines
from rollyard_tasks.task_file import task_json
from rollyard_tasks.task_list import TaskListError

from rollyard import terminal
from rollyard.connection import Server, connect
from rollyard.errors import CliError, InvalidInput, LookupFailed, StartFailed, UsageProblem
from rollyard.jobs.manifests import (
    check_job,
    extension_problems,
    extensions_with,
    has_manifests,
    local_path,
    read_manifests,
    read_tasks,
)
from rollyard.jobs.running import follow, submit_job
from rollyard.local.options import DEFAULT_POOL
from rollyard.local.running_up import interruptible, running_up

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client
    from rollyard_crds.trajectory import Trajectory

LOG_LINES: Final = 12
"""The lines of a log that are shown if the infrastructure failed."""
MAX_BASE: Final = 32
"""The longest path of a folder for temporary homes, in characters."""
KEPT_SECONDS: Final = 600
"""The seconds after which the control plane deletes the job of a trial that was killed."""


def trial_of(
    path: Path,
    task_id: str | None,
    handler: str | None,
    task_format: str | None,
    plugins: Sequence[Path],
    seconds: int,
    *,
    in_pool: bool,
) -> RolloutJob:
    """Return a job with one task of a manifest, or of a task list and a handler, which is played once.

    Args:
        path: The manifest, the task list, or the folder of task folders.
        task_id: The id of the task. The default is the first one.
        handler: The handler of a task list.
        task_format: The format of a task list.
        plugins: The plugins that the job may use.
        seconds: The longest time that the rollout may take.
        in_pool: Whether a control plane checks the names, which may offer more than is installed here.

    Raises:
        LookupFailed: There is no such file or no such task.
        InvalidInput: A plugin, the job or its task is refused, for the reasons that `rollyard validate` has.
        UsageProblem: A task list comes without a handler, or a manifest with one.
    """
    if path.is_dir():
        handler, task_format = handler or "harbor", task_format or "harbor"
    if not path.is_dir() and has_manifests(path):
        if handler is not None or task_format is not None:
            raise UsageProblem("--handler and --format are for a bare task list; a manifest names both")
        job = _only_job(path)
    elif handler is None:
        raise UsageProblem(f"{path}: a task list needs --handler, such as `--handler shell`")
    else:
        spec = {
            "tasks": {"url": path.resolve().as_uri(), "format": task_format},
            "handler": handler,
            "backendRef": {"name": DEFAULT_POOL},
        }
        job = RolloutJob.model_validate({"metadata": {"name": "try"}, "spec": spec})
    trial = _of_one(job, _chosen(path, job, task_id), seconds)
    extensions = extensions_with(plugins)
    unknown = extension_problems(trial, extensions)
    if not (in_pool and unknown):
        where = f"RolloutJob {job.metadata.name!r}: "
        problems = [problem.removeprefix(where) for problem in check_job(trial, extensions).problems]
        _refuse(path, problems)
    return trial


def _refuse(path: Path, problems: Sequence[str]) -> None:
    """Print all problems with a file but the last one, and raise an error with that.

    Raises:
        InvalidInput: There is a problem.
    """
    for problem in problems[:-1]:
        terminal.echo(f"rollyard: {path}: {problem}", err=True)
    if problems:
        raise InvalidInput(f"{path}: {problems[-1]}")


def _only_job(path: Path) -> RolloutJob:
    jobs = [manifest for manifest in read_manifests(path) if isinstance(manifest, RolloutJob)]
    if len(jobs) != 1:
        raise InvalidInput(f"{path}: must hold one RolloutJob, and holds {len(jobs)}")
    return jobs[0]


def _chosen(path: Path, job: RolloutJob, task_id: str | None) -> Task:
    """Return the task of this id, or the first one.

    Raises:
        LookupFailed: There is no such task, or no such file.
        InvalidInput: The tasks are not on this machine, or one of them is malformed.
    """
    source = job.spec.tasks
    file = local_path(source.url or "")
    tasks: Sequence[Task] = ()
    if source.inline is not None:
        tasks = source.inline
    elif file is None:
        raise InvalidInput(
            f"{path}: spec.tasks: the tasks are not on this machine; give a file of tasks with --handler"
        )
    else:
        try:
            tasks = read_tasks(file, source)
        except TaskListError as error:
            _refuse(file, error.problems)
    if not tasks:
        raise LookupFailed(f"{file or path}: holds no task")
    for task in tasks:
        if task_id in (None, task.id):
            return task
    first = ", ".join(task.id for task in tasks[:4])
    raise LookupFailed(f"--task {task_id}: no such task among {len(tasks)}, which begin with {first}")


def _of_one(job: RolloutJob, task: Task, seconds: int) -> RolloutJob:
    """Return the job with this task alone, played once. What fails is not tried again, so that it is seen."""
    spec = job.spec
    stages = {
        name: stage.model_copy(update={"replicas": 1, "max_replicas": None, "max_attempts": 1})
        for name, stage in (("init", spec.stages.init), ("run", spec.stages.run), ("eval", spec.stages.eval))
    }
    changes = {
        "tasks": TaskSource(inline=[task]),
        "samples_per_task": 1,
        "dynamic_sampling": None,
        "sandbox": spec.sandbox.model_copy(update={"warm": 0}),
        "stages": spec.stages.model_copy(update=stages),
        "suspend": False,
        "backoff_limit": 0,
        "active_deadline_seconds": seconds,
        "ttl_seconds_after_finished": KEPT_SECONDS,
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changes)})


def _task_of(trial: RolloutJob) -> Task:
    assert trial.spec.tasks.inline is not None
    return trial.spec.tasks.inline[0]


def _in_pool(job: RolloutJob, pool: str) -> RolloutJob:
    """Return the job with this pool, unless its agent needs no model."""
    if job.spec.backend_ref is None:
        return job
    return job.model_copy(update={"spec": job.spec.model_copy(update={"backend_ref": BackendRef(name=pool)})})


@terminal.cleaned_up()
@interruptible()
def play_here(trial: RolloutJob, arguments: Sequence[str], policy: str, console: Console) -> None:
    """Play the task in a `rollyard up` of its own, whose home is removed afterwards, and show it.

    Args:
        trial: The job of one task.
        arguments: The arguments of `rollyard up`.
        policy: What samples, for people.
        console: The console to print on.

    Raises:
        StartFailed: `rollyard up` did not start.
        CliError: The rollout has no reward, because the infrastructure failed.
    """
    job = _in_pool(trial, DEFAULT_POOL)
    job.spec.placement = None
    # A long path leaves no room for the sockets of sandboxes.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= MAX_BASE else "/tmp"
    with tempfile.TemporaryDirectory(prefix="rollyard-try-", dir=base, ignore_cleanup_errors=True) as folder:
        home = Home(Path(folder).resolve())
        home.make()
        with contextlib.ExitStack() as stack:
            with console.status(f"Starting control plane, worker and {policy}"):
                try:
                    stack.enter_context(running_up(home, arguments))
                except StartFailed as error:
                    # The log is removed with the home.
                    raise StartFailed(str(error).partition(" (log: ")[0]) from error
            client = stack.enter_context(connect(None, home.root, "default"))
            console.print(f"Task {_task_of(trial).id} against {policy}", soft_wrap=True)
            try:
                _play(client, job, console)
            except CliError:
                _show_log(home, console)
                raise


@terminal.cleaned_up()
@interruptible()
def play_in_pool(trial: RolloutJob, pool: str, server: Server, console: Console) -> None:
    """Play the task as a job of one rollout in a pool of a running control plane, show it, and delete it.

    Raises:
        LookupFailed: There is no such pool.
        CliError: The rollout has no reward, because the infrastructure failed.
    """
    with connect(*server) as client:
        # Without this, the job would wait for the pool.
        client.pool(pool)
        job = _in_pool(trial, pool)
        job.metadata.name = f"try-{secrets.token_hex(4)}"
        console.print(
            f"Task {_task_of(trial).id} in the pool {pool}, as the job {job.metadata.name}", soft_wrap=True
        )
        _play(client, job, console)


def _play(client: Client, job: RolloutJob, console: Console) -> None:
    """Play the job's one rollout and show it. The job is deleted afterwards.

    Raises:
        CliError: The rollout has no reward, because the infrastructure failed.
    """
    job.metadata.namespace = client.namespace
    with _submitted(client, job):
        ended = follow(client, job.metadata.name, client.namespace, console)
        record = next(iter(client.trajectories(job.metadata.name)), None)
        if record is None:
            raise CliError(f"the task was not played: {ended.status.message}", reason="TrialFailed")
        show(record, ended, console)


@contextlib.contextmanager
def _submitted(client: Client, job: RolloutJob) -> Iterator[None]:
    """Submit a job whose one task is uploaded, and delete the job at the end."""
    from rollyard_client.errors import RollyardError

    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(task_json(_task_of(job)) + b"\n")
        file.flush()
        source = TaskSource(url=Path(file.name).as_uri())
        submit_job(client, job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": source})}))
    try:
        yield
    finally:
        # A control plane that is gone has nothing to delete, or deletes it later.
        with contextlib.suppress(RollyardError):
            client.delete(job.metadata.name)


def show(record: Trajectory, job: RolloutJob, console: Console) -> None:
    """Print a rollout turn by turn, and then how it ended.

    Raises:
        CliError: The rollout has no reward, because the infrastructure failed.
    """
    from rollyard.render.trajectory import TrajectoryView, outcome

    if record.turns:
        TrajectoryView(console).turns(record)
        console.print()
    if record.status == "cancelled":
        # The rollouts of a job that ends early are cancelled. Why it has ended, only the job says.
        late = any(condition.reason == "DeadlineExceeded" for condition in job.status.conditions)
        more = "; --timeout gives it more time" if late else ""
        raise CliError(f"the rollout has no reward: {job.status.message}{more}", reason="TrialFailed")
    for line in outcome(record):
        console.print(line, soft_wrap=True)
    if record.status == "failed":
        raise CliError(f"the rollout has no reward: {record.reason}, see above", reason="TrialFailed")


def _show_log(home: Home, console: Console) -> None:
    """Print the last lines of the worker's log."""
    for log in home.logs.glob("*-worker-*.log"):
        console.print("The worker's log ends with:")
        for line in last_lines(log, LOG_LINES):
            console.print(f"  │ {line}", soft_wrap=True)
