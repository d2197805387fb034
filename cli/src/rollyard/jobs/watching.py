"""Functions that follow one job until it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import click
from rollyard_crds import RolloutJob

from rollyard import terminal
from rollyard.errors import CliError

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client

POLL_SECONDS: Final = 0.5
UNREACHABLE_SECONDS: Final = 30.0


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
    from rollyard_client.errors import JobReplaced, NotFound, ServerUnavailable
    from rollyard_client.finish import check_same, finished

    from rollyard.render.progress import progress_view

    # This raises before any progress bar is shown if there is no such job.
    with contextlib.suppress(ServerUnavailable):
        client.job(name, namespace)
    with progress_view(console or terminal.console()) as show:
        silent_since: float | None = None
        uid: str | None = None
        while True:
            try:
                job = client.job(name, namespace)
            except ServerUnavailable:
                # A control plane that was killed is started again within seconds.
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
            show(job)
            if also is not None:
                also(job)
            if finished(job):
                return job
            time.sleep(POLL_SECONDS)


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
