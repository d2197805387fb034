"""The commands of `rollyard`. A module is imported only when one of its commands is called."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

sandbox_option: Final = click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "apptainer", "docker", "podman"]),
    default="bubblewrap",
    show_default=True,
    help="The kind of the sandboxes here, for handlers that need some.",
)
"""The option of commands that evaluate on this machine."""
plugin_option: Final = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Python file with handlers, tools or reward functions of yours, or a folder of such; repeatable.",
)
"""The option of commands that use extensions on this machine."""
