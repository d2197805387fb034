"""A job from its submission, with the upload of its tasks, until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click
from rollyard_client import Client, Invalid, NotFound
from rollyard_crds import Manifest, RolloutJob
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_tasks.task_list import TaskListError

from rollyard import terminal
from rollyard.errors import CliError, InvalidInput
from rollyard.jobs.manifests import local_path, packed

if TYPE_CHECKING:
    from rich.console import Console

Answer = TypeVar("Answer")
POLL_SECONDS: Final = 0.5
UNREACHABLE_SECONDS: Final = 30.0
ROLLOUT_SECONDS: Final = 1.0
"""The seconds between two readings of a rollout, whose worker sends what is new once a second."""


def phase_of(client: Client, job: RolloutJob) -> str | None:
    """Return the phase of the job that has this job's name already, or None if there is none.

    Raises:
        RollyardError: The server refuses the call.
    """
    try:
        return client.job(job.metadata.name, job.metadata.namespace).status.phase
    except NotFound:
        return None


def submit_job(client: Client, job: RolloutJob) -> RolloutJob:
    """Submit a job, and return it. If its tasks are in a file on this machine, the file is uploaded first.

    Raises:
        RollyardError: The server refuses the job.
        InvalidInput: The file cannot be read.
    """
    sent = _with_uploads(client, job)
    try:
        return client.submit(sent)
    except Invalid as error:
        url, named = sent.spec.tasks.url, job.spec.tasks.url
        if url is None or named is None or url == named:
            raise
        # Users know the file by its name, not by the URL of its upload.
        errors = [line.replace(url, named) for line in error.errors]
        message = str(error).replace(url, named)
        raise Invalid(message, reason=error.reason, status=error.status, errors=errors) from error


def _with_uploads(client: Client, job: RolloutJob) -> RolloutJob:
    """Return the job with the URLs of its uploaded files, where it names files on this machine."""
    path = local_path(job.spec.tasks.url or "")
    if path is None or not (path.is_file() or path.is_dir()):
        return job
    try:
        uploaded: dict[str, object] = {"url": _uploaded(client, job, path)}
    except OSError as error:
        raise InvalidInput(f"spec.tasks.url: {path}: {error.strerror or error}") from error
    specs = local_path(job.spec.tasks.specs or "")
    if specs is not None:
        try:
            uploaded["specs"] = client.upload(specs, job.metadata.namespace)
        except OSError as error:
            raise InvalidInput(f"spec.tasks.specs: {specs}: {error.strerror or error}") from error
    tasks = job.spec.tasks.model_copy(update=uploaded)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})


def _uploaded(client: Client, job: RolloutJob, path: Path) -> str:
    """Upload a file, or the task folders below a folder as one file, and return its URL."""
    if path.is_file():
        return client.upload(path, job.metadata.namespace)
    if job.spec.tasks.format != "harbor":
        raise InvalidInput(f"spec.tasks.url: {path} is a folder, which only the format 'harbor' reads")
    try:
        with packed(path) as file:
            return client.upload(file, job.metadata.namespace)
    except TaskListError as error:
        raise InvalidInput(f"spec.tasks.url: {path}: {error}") from error


OVER_REST: Final = frozenset({"suspend", "priority"})
"""The fields of a job's spec that its driver takes over from the control plane where it has an object."""


def apply_manifest(client: Client, manifest: Manifest) -> Literal["created", "configured", "unchanged"]:
    """Create what a manifest describes, or change it. Fields that the manifest leaves out stay as they are.

    Raises:
        RollyardError: The server refuses the object, or the change of a field.
        InvalidInput: A file cannot be read, or the object is one of a cluster, where kubectl changes fields.
    """
    meta = manifest.metadata
    try:
        current: Manifest = (
            client.job(meta.name, meta.namespace)
            if isinstance(manifest, RolloutJob)
            else client.pool(meta.name, meta.namespace)
        )
    except NotFound:
        if isinstance(manifest, RolloutJob):
            submit_job(client, manifest)
        else:
            client.create_pool(manifest)
        return "created"
    wanted = _with_uploads(client, manifest) if isinstance(manifest, RolloutJob) else manifest
    before, after = current.spec.to_json(), wanted.spec.to_json()
    fields = type(wanted.spec).model_fields
    names = [fields[name].alias or name for name in wanted.spec.model_fields_set]
    changes = {name: after.get(name) for name in names if after.get(name) != before.get(name)}
    labels = current.metadata.labels | meta.labels
    annotations = current.metadata.annotations | meta.annotations
    described = (labels, annotations) != (current.metadata.labels, current.metadata.annotations)
    if not changes and not described:
        return "unchanged"
    if OBJECT_UID in current.metadata.annotations:
        _change_object(client, wanted, changes, described)
        return "configured"
    spec = {name: value for name, value in {**before, **changes}.items() if value is not None}
    metadata = {"name": meta.name, "namespace": meta.namespace, "labels": labels, "annotations": annotations}
    client.replace(type(wanted).model_validate({"metadata": metadata, "spec": spec}))
    return "configured"


def _change_object(client: Client, wanted: Manifest, changes: dict[str, Any], described: bool) -> None:
    """Change what is an object of a cluster too, whose driver takes over some changes from here.

    Raises:
        InvalidInput: The driver would undo the change.
    """
    meta, is_job = wanted.metadata, isinstance(wanted, RolloutJob)
    fixed = [f"spec.{name}" for name in changes if is_job and name not in OVER_REST]
    fixed += ["metadata"] if described else []
    if fixed:
        raise InvalidInput(
            f"{', '.join(fixed)}: {wanted.kind} {meta.name!r} is an object of a cluster: "
            "`kubectl apply -f FILE` changes this"
        )
    if is_job:
        client.update(meta.name, namespace=meta.namespace, **changes)
    else:
        client.patch_pool(meta.name, changes, meta.namespace)


def follow(
    client: Client,
    name: str,
    namespace: str,
    console: Console | None = None,
    also: Callable[[RolloutJob], None] | None = None,
) -> RolloutJob:
    """Show the job's progress until it is Finished, and return its last state.

    `also` is called with each observed state of the job.

    Raises:
        CliError: The job was deleted. The message says whether another one has its name.
    """
    from rollyard_client.errors import JobReplaced, ServerUnavailable
    from rollyard_client.finish import check_same, finished

    from rollyard.render.progress import progress_view

    # This raises before any progress bar is shown if there is no such job.
    with contextlib.suppress(ServerUnavailable):
        client.job(name, namespace)
    with progress_view(console or terminal.console()) as show:
        uid: str | None = None
        while True:
            try:
                job = answered(partial(client.job, name, namespace))
            except NotFound as error:
                if uid is None:
                    raise
                raise CliError(f"job {name!r} was deleted while it was watched") from error
            try:
                check_same(job, uid)
            except JobReplaced as error:
                raise CliError(
                    f"job {name!r} was deleted while it was watched, and another one was submitted under its "
                    f"name; `rollyard watch {name}` follows that one"
                ) from error
            uid = job.metadata.uid
            show(job)
            if also is not None:
                also(job)
            if finished(job):
                return job
            time.sleep(POLL_SECONDS)


def answered(call: Callable[[], Answer]) -> Answer:
    """Return what a call of the client returns, and repeat it while the control plane does not answer.

    Raises:
        ServerUnavailable: It has not answered for UNREACHABLE_SECONDS.
    """
    from rollyard_client.errors import ServerUnavailable

    end = time.monotonic() + UNREACHABLE_SECONDS
    while True:
        try:
            return call()
        except ServerUnavailable:
            # A control plane that was killed is restarted within seconds.
            if time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS)


def follow_rollout(
    client: Client, name: str, rollout: str, namespace: str, console: Console | None = None
) -> None:
    """Print the conversation of a rollout until it has ended, and then how it ended.

    On a terminal, the running turn is shown as it grows. Elsewhere a line says from time to time how long it
    is. What had not been printed when the rollout ended is printed from its record.

    Raises:
        NotFound: There is no such job or rollout.
        ServerUnavailable: The control plane has not answered for UNREACHABLE_SECONDS.
    """
    from rollyard_client import Conflict

    from rollyard.render.progress import conversation_view
    from rollyard.render.trajectory import why

    with conversation_view(console or terminal.console()) as view:
        while True:
            try:
                view.update(answered(partial(client.running_rollout, name, rollout, namespace)))
            except Conflict as error:
                if error.reason != "RolloutEnded":
                    raise
                break
            time.sleep(ROLLOUT_SECONDS)
        record = answered(partial(client.trajectory, name, rollout, namespace))
        view.finish(record)
    reward = "without a reward" if record.reward is None else f"with the reward {record.reward:g}"
    outcome = f"ended {reward}" if record.status == "succeeded" else why(record)
    terminal.echo_line(f"rollout {rollout} {outcome}; `rollyard view {name} {rollout}` shows its record")


@contextlib.contextmanager
def leaving(name: str) -> Iterator[None]:
    """Print a message if Ctrl-C ends the block, because the job continues."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(
            f"No longer watching; job {name} continues (`rollyard watch {name}`, `rollyard cancel {name}`)",
            err=True,
        )
        raise


def require_success(job: RolloutJob, hint: bool = False) -> None:
    """Raise CliError unless the job succeeded.

    With `hint`, the message names the command that shows why rollouts failed.
    """
    if job.status.phase == "Succeeded":
        return
    name = job.metadata.name
    text = f"job {name!r} is {job.status.phase}: {job.status.message}"
    if hint and job.status.counts.failed:
        text += f" (why: `rollyard view {name} --failed`)"
    raise CliError(text, reason="JobFailed")
