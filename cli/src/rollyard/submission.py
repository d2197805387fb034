"""Submitting a job to a control plane that may be on another machine, and not see this one's files."""

from __future__ import annotations

from pathlib import Path

from rollyard_client import Client, Conflict, Invalid, RollyardError
from rollyard_crds import RolloutJob
from rollyard_crds.rolloutjob import MAX_INLINE_TASKS

from rollyard.errors import InvalidInput
from rollyard.manifests import local_path, read_tasks


def _file_unseen(error: RollyardError) -> bool:
    """Whether the refusal may be due to a task file that only this machine has.

    A job whose tasks went along stands with another spec than its manifest.
    """
    if isinstance(error, Conflict):
        return error.reason == "AlreadyExists"
    return any(line.startswith("spec.tasks.url:") and " cannot be read: " in line for line in error.errors)


def submit(client: Client, job: RolloutJob) -> tuple[RolloutJob, Path | None]:
    """Submit a job; where the control plane does not see its task file, the tasks go along.

    Returns:
        The job, and the file whose tasks went along; None: the control plane reads the tasks itself.

    Raises:
        RollyardError: it is refused.
        InvalidInput: the file holds more tasks than a manifest may.
    """
    try:
        return client.submit(job), None
    except (Conflict, Invalid) as error:
        path = local_path(job.spec.tasks.url or "")
        if path is None or not _file_unseen(error) or not path.is_file():
            raise
        tasks = read_tasks(path)
        if len(tasks) > MAX_INLINE_TASKS:
            raise InvalidInput(
                f"spec.tasks.url: the control plane does not see {path}, and its {len(tasks)} tasks are more "
                f"than the {MAX_INLINE_TASKS} that can go with a manifest; put the file where the control "
                "plane reads it (a volume, https://, s3://), or push the tasks to a job with 'stream: true'"
            ) from error
        source = job.spec.tasks.model_copy(update={"url": None, "inline": tasks})
        spec = job.spec.model_copy(update={"tasks": source})
        try:
            return client.submit(job.model_copy(update={"spec": spec})), path
        except Conflict:
            raise error from None
