"""The command `rollyard worker`, which passes its arguments to the stage worker's own command line."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run a stage worker against a control plane (arguments as of `python -m rollyard_pipeline`)."""
    from rollyard.extras import require

    require("`rollyard worker`", "worker")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "rollyard_pipeline", *arguments])
