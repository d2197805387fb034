"""The command that runs a control plane: `rollyard control-plane`, and `python -m rollyard_api`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.command_line import GroupedCommand, declared_options, on_command_line
from rollyard_api.options.declared import ControlPlaneOptions
from rollyard_api.options.sources import drop_variables, load

NAME: Final = "rollyard control-plane"
EXIT_USAGE: Final = 2


@click.command("control-plane", cls=GroupedCommand)
@declared_options(ControlPlaneOptions)
def command(config: Path | None, **arguments: Any) -> int:
    """Run a control plane of your own, without workers and backends.

    Each option is also a variable, such as ROLLYARD_CONTROL_PLANE_LEASE_SECONDS, and a line of the file of
    --config.
    """
    try:
        options = load(ControlPlaneOptions, on_command_line(arguments), config, NAME)
    except OptionInvalid as error:
        click.echo(error, err=True)
        return EXIT_USAGE
    drop_variables(ControlPlaneOptions, os.environ)
    from rollyard_api.program import run

    return run(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a control plane until SIGTERM or SIGINT, and return the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        return int(command.main(arguments, prog_name=NAME, standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
