"""The commands of `rollyard slurm-bridge` and their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rollyard_api.options.command_line import GroupedCommand, declared_options
from rollyard_api.options.sources import drop_variables

from rollyard import terminal
from rollyard.commands.slurm_bridge.options import BridgeCommandOptions, bridge_home, bridge_options
from rollyard.commands.slurm_bridge.running import print_scripts, require_extras, run_here, start_detached
from rollyard.declared import load_options
from rollyard.errors import UsageProblem
from rollyard.extras import require

DOWN_SECONDS = 240.0
HOME = click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="State folder, on storage that the nodes share [~/.local/state/rollyard].",
)


@click.group()
def command() -> None:
    """Run jobs and backends on a Slurm cluster, from a login or service node, without root."""


@command.command(cls=GroupedCommand)
@declared_options(BridgeCommandOptions)
@click.option(
    "--dry-run", is_flag=True, help="Print the batch scripts of --file, or of a sample; start nothing."
)
@click.option(
    "-f", "--file", "files", multiple=True, type=click.Path(path_type=Path), help="With --dry-run: manifests."
)
@click.option("--detach", is_flag=True, help="Return once it is ready; stop it with `slurm-bridge down`.")
@click.pass_context
def up(
    ctx: click.Context,
    /,
    config: Path | None,
    dry_run: bool,
    files: tuple[Path, ...],
    detach: bool,
    **given: Any,
) -> None:
    """Start the control plane here, and workers and backends as Slurm jobs.

    Ctrl-C or `down` ends them all; SIGTERM ends the bridge alone, and the next `up` on the same
    home finds its Slurm jobs again.
    """
    if not given["join"]:
        require("`rollyard slurm-bridge up`", "slurm", "api")
    chosen = load_options(BridgeCommandOptions, given, config, "rollyard slurm-bridge up")
    options = bridge_options(chosen)
    if dry_run:
        print_scripts(options, files)
        return
    require_extras(options, chosen.engine)
    if files:
        raise UsageProblem("--file goes with --dry-run; jobs are given with `rollyard submit -f`")
    if detach:
        start_detached(ctx, options)
    else:
        # The control plane and the Slurm jobs inherit no password.
        drop_variables(BridgeCommandOptions, os.environ)
        run_here(options)


@command.command()
@HOME
@click.option("--keep-jobs", is_flag=True, help="End the bridge alone; its Slurm jobs continue.")
def down(home: Path | None, keep_jobs: bool) -> None:
    """End the bridge of a home and its Slurm jobs. State and trajectories stay."""
    import asyncio
    import signal
    import time

    from rollyard_drivers.host.processes import is_alive, send
    from rollyard_slurm.bridge import end_home
    from rollyard_slurm.options import BridgeOptions

    from rollyard.errors import CliError

    place = bridge_home(home)
    running = place.supervisor()
    if running is not None:
        send(running, signal.SIGTERM if keep_jobs else signal.SIGINT)
        deadline = time.monotonic() + DOWN_SECONDS
        while is_alive(running) and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_alive(running):
            raise CliError(f"process {running.pid} does not end; see {place.logs}")
        click.echo(f"stopped (process {running.pid}); state and trajectories stay in {place.root}")
        return
    if not (place.root / "bridge.json").exists():
        click.echo(f"nothing runs on {place.root}")
        return
    with place.locked():
        say = lambda line: terminal.echo_line(line, err=True)  # noqa: E731
        count = 0 if keep_jobs else asyncio.run(end_home(place, BridgeOptions(place.root), say))
    click.echo(f"no bridge runs on {place.root}; Slurm jobs ended: {count}")


@command.command()
@HOME
def status(home: Path | None) -> None:
    """Show the bridge of a home and its Slurm jobs."""
    import asyncio

    from rollyard_slurm.status import overview

    place = bridge_home(home)
    for line in asyncio.run(overview(place)):
        click.echo(line)
