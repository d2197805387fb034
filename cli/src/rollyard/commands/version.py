"""`rollyard version`."""

from __future__ import annotations

from importlib.metadata import version

import click


@click.command()
def command() -> None:
    """Print the version."""
    click.echo(f"rollyard {version('rollyard')}")
