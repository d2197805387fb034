"""The command `rollyard delete`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard.connection import connect, server_options


@click.command()
@click.argument("kind", metavar="[KIND]")
@click.argument("name", required=False)
@server_options
def command(kind: str, name: str | None, url: str | None, home: Path | None, namespace: str) -> None:
    """Delete a job or a pool: `delete NAME` for a job, or `delete rj|bp NAME`.

    A job that has not ended is cancelled. Its trajectories stay in the trajectory store.
    """
    from rollyard.commands.get import named

    which, name = named("delete", kind, name)
    with connect(url, home, namespace) as client:
        if which == "bp":
            client.delete_pool(name, namespace)
            click.echo(f"backendpool/{name} deleted")
        else:
            client.delete(name, namespace)
            click.echo(f"rolloutjob/{name} deleted")
