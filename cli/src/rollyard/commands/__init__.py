"""The commands of `rollyard`. A module is imported only when one of its commands is called."""

from __future__ import annotations

from typing import Final

import click

sandbox_option: Final = click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "apptainer"]),
    default="bubblewrap",
    show_default=True,
    help="The kind of the sandboxes here, for handlers that need some.",
)
"""The option of commands that evaluate on this machine."""
