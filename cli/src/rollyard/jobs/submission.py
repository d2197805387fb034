"""Submission of a job whose tasks are in a file of this machine, which is uploaded."""

from __future__ import annotations

from pathlib import Path

from rollyard_client import Client, Invalid, NotFound
from rollyard_crds import RolloutJob
from rollyard_tasks.task_list import TaskListError

from rollyard.errors import InvalidInput
from rollyard.jobs.manifests import local_path, packed


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
    """Submit a job, and return it. If its tasks are in a file of this machine, the file is uploaded first.

    Raises:
        RollyardError: The server refuses the job.
        InvalidInput: The file cannot be read.
    """
    path = local_path(job.spec.tasks.url or "")
    if path is None or not (path.is_file() or path.is_dir()):
        return client.submit(job)
    try:
        url = _uploaded(client, job, path)
    except OSError as error:
        raise InvalidInput(f"spec.tasks.url: {path}: {error.strerror or error}") from error
    specs = local_path(job.spec.tasks.specs or "")
    uploaded: dict[str, object] = {"url": url}
    if specs is not None:
        try:
            uploaded["specs"] = client.upload(specs, job.metadata.namespace)
        except OSError as error:
            raise InvalidInput(f"spec.tasks.specs: {specs}: {error.strerror or error}") from error
    try:
        return client.submit(_with(job, **uploaded))
    except Invalid as error:
        # Users know the file by its name, not by the URL of its upload.
        errors = [line.replace(url, path.as_uri()) for line in error.errors]
        message = str(error).replace(url, path.as_uri())
        raise Invalid(message, reason=error.reason, status=error.status, errors=errors) from error


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


def _with(job: RolloutJob, **source: object) -> RolloutJob:
    tasks = job.spec.tasks.model_copy(update=source)
    return job.model_copy(update={"spec": job.spec.model_copy(update={"tasks": tasks})})
