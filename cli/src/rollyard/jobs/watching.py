"""Following one job until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click
from rollyard_crds import RolloutJob

from rollyard import terminal
from rollyard.errors import CliError, JobFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client

POLL_SECONDS = 0.25
UNREACHABLE_SECONDS = 30.0


def watch(
    client: Client,
    name: str,
    namespace: str,
    console: Console | None = None,
    also: Callable[[RolloutJob], None] | None = None,
) -> RolloutJob:
    """Shows the job's progress until it is Finished; returns it as it ended.

    `also` is called with each state of the job that is seen.

    Raises:
        CliError: the job was deleted; the message says whether another one has its name.
    """
    from rollyard_client.errors import JobReplaced, NotFound, ServerUnavailable
    from rollyard_client.finish import check_same, finished

    from rollyard.render.progress import progress_view

    # No bars for a job that there is not.
    with contextlib.suppress(ServerUnavailable):
        client.job(name, namespace)
    with progress_view(console or terminal.console()) as view:
        silent_since: float | None = None
        uid: str | None = None
        while True:
            try:
                job = client.job(name, namespace)
            except ServerUnavailable:
                # A control plane that was killed comes back within seconds.
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > UNREACHABLE_SECONDS:
                    raise
                time.sleep(POLL_SECONDS)
                continue
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
            silent_since = None
            view.update(job)
            if also is not None:
                also(job)
            if finished(job):
                return job
            time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def leaving(name: str) -> Iterator[None]:
    """Where Ctrl-C ends the watching and not the job, says so."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(
            f"No longer watching; job {name} continues (`rollyard watch {name}`, `rollyard cancel {name}`)",
            err=True,
        )
        raise


def require_success(job: RolloutJob, hint: bool = False) -> None:
    """Raises JobFailed unless the job succeeded. `hint`: say how to read what failed."""
    if job.status.phase == "Succeeded":
        return
    name = job.metadata.name
    text = f"job {name!r} is {job.status.phase}: {job.status.message}"
    if hint and job.status.counts.failed:
        text += f" (why: `rollyard view {name} --failed`)"
    raise JobFailed(text)
