"""The command `rollyard version`."""

from __future__ import annotations

import click
from rollyard_process.version import installed_version


@click.command()
def command() -> None:
    """Print the version."""
    click.echo(f"rollyard {installed_version()}")
