"""The command `rollyard doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard import terminal


@click.command()
@click.option(
    "--profile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A Slurm site's YAML file, as of `slurm-bridge up`: its slurmrestd is tried.",
)
def command(profile: Path | None) -> int:
    """Show what works on this machine, and what to do about the rest. Exit with 1 if something is missing."""
    from rich.text import Text
    from rollyard_drivers.host.home import Home, default_home

    from rollyard.doctor import examine

    console = terminal.console()
    styles = {"ok": "green", "missing": "bold red", "optional": "yellow"}
    missing = False
    for finding in examine(Home(default_home().expanduser().resolve()).run, profile):
        missing = missing or finding.verdict == "missing"
        line = Text(f"{finding.verdict:<9}", style=styles[finding.verdict])
        line.append(f"{finding.name:<16} {finding.found}", style="default")
        console.print(line, soft_wrap=True)
        if finding.advice:
            console.print(Text(f"{'':<26}{finding.advice}", style="dim"), soft_wrap=True)
    return int(missing)
