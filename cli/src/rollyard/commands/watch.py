"""The command `rollyard watch`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard import terminal
from rollyard.connection import connect, server_options


@click.command()
@click.argument("name")
@server_options
def command(name: str, url: str | None, home: Path | None, namespace: str) -> None:
    """Follow a job's progress until it ends: bars on a terminal, lines elsewhere."""
    from rollyard.jobs.watching import leaving, require_success, watch

    with connect(url, home, namespace) as client, leaving(name):
        job = watch(client, name, namespace)
    terminal.echo_line(f"{job.status.phase}: {job.status.message}")
    require_success(job, hint=True)
