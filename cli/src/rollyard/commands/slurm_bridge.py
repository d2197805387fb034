"""The commands of `rollyard slurm-bridge`.

They run the bridge in this terminal or in the background, print its batch scripts, end it, or show it.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rollyard_api.options.command_line import GroupedCommand, declared_options
from rollyard_api.options.sources import drop_variables

from rollyard import terminal
from rollyard.bridge_options import BridgeCommandOptions, bridge_home, bridge_options
from rollyard.declared import load_options, speaker
from rollyard.errors import CliError, UsageProblem
from rollyard.extras import require

if TYPE_CHECKING:
    from rollyard_slurm.options import BridgeOptions

DOWN_SECONDS: Final = 240.0
HOME: Final = click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="State folder, on storage that the nodes share [~/.local/state/rollyard].",
)
DETACH_SECONDS: Final = 120.0
_SUBMIT: Final = "Submit with `rollyard submit -f job.yaml`"
_END: Final = "Ctrl-C ends bridge and Slurm jobs."


@click.group()
def bridge() -> None:
    """Run jobs and backends on a Slurm cluster, from a login or service node, without root."""


@bridge.command(cls=GroupedCommand)
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
    **arguments: Any,
) -> None:
    """Start the control plane here, and workers and backends as Slurm jobs.

    Ctrl-C or `down` ends all of it; SIGTERM ends the bridge alone, and the next `up` on the same home finds
    its Slurm jobs again.
    """
    if not arguments["join"]:
        require("`rollyard slurm-bridge up`", "slurm", "api")
    chosen = load_options(BridgeCommandOptions, arguments, config, "rollyard slurm-bridge up")
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


@bridge.command()
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

    folder = bridge_home(home)
    running = folder.supervisor()
    if running is not None:
        send(running, signal.SIGTERM if keep_jobs else signal.SIGINT)
        deadline = time.monotonic() + DOWN_SECONDS
        while is_alive(running) and time.monotonic() < deadline:
            time.sleep(0.05)
        if is_alive(running):
            raise CliError(f"process {running.pid} does not end; see {folder.logs}")
        click.echo(f"stopped (process {running.pid}); state and trajectories stay in {folder.root}")
        return
    if not (folder.root / "bridge.json").exists():
        click.echo(f"nothing runs on {folder.root}")
        return
    with folder.locked():
        say = partial(terminal.echo_line, err=True)
        count = 0 if keep_jobs else asyncio.run(end_home(folder, BridgeOptions(folder.root), say))
    click.echo(f"no bridge runs on {folder.root}; Slurm jobs ended: {count}")


@bridge.command()
@HOME
def status(home: Path | None) -> None:
    """Show the bridge of a home and its Slurm jobs."""
    import asyncio

    from rollyard_slurm.bridge import overview

    folder = bridge_home(home)
    for line in asyncio.run(overview(folder)):
        click.echo(line)


def print_scripts(options: BridgeOptions, files: tuple[Path, ...]) -> None:
    """Print the batch scripts of the manifests in `files`, or of a sample job, and start nothing."""
    import asyncio

    from rollyard_slurm.preview import sample_job, scripts

    from rollyard.jobs.manifests import read_manifests

    things = [thing for path in files for thing in read_manifests(path)] or [sample_job(), *options.pools]
    for text in asyncio.run(scripts(options, things)):
        click.echo(text)


def require_extras(options: BridgeOptions, engine: str) -> None:
    """Check that the packages that the bridge, its control plane and its jobs need are installed.

    Jobs whose profile names another Python use the packages of that one.

    Raises:
        UsageProblem: A package is missing.
    """
    if not options.join:
        require("`rollyard slurm-bridge up`", "slurm", "api")
    if options.profile.workers.python is None:
        require("`rollyard slurm-bridge up`", "slurm", "worker", "sandbox")
    if engine == "embedded" and options.profile.backends.python is None:
        require("`rollyard slurm-bridge up --engine embedded`", "engine")


def _how(options: BridgeOptions) -> str:
    return "The bridge has joined" if options.join else "Rollyard runs at"


def run_here(options: BridgeOptions) -> None:
    """Run the bridge in this process until a signal ends it."""
    import asyncio

    from rollyard_slurm.bridge import Bridge, BridgeReady, install_signals
    from rollyard_slurm.options import served

    say = speaker(click.echo, "rollyard.slurm-bridge")
    trouble = speaker(partial(terminal.echo_line, err=True), "rollyard.slurm-bridge")

    def ready(state: BridgeReady) -> None:
        say(f"{_how(options)} {state.url}")
        say(f"  sandbox  {options.sandbox}")
        say(f"  home     {state.home.root}  (logs in {state.home.logs})")
        if state.continuing:
            say(f"  {state.continuing} Slurm jobs of an earlier run continue")
        if options.join:
            say(f"  serves   {served(options.namespaces)}")
            say(
                "Their jobs and pools with `placement: slurm` run here; "
                "a user who may make a BackendPool there can run programs as you."
            )
        say(_END if options.join else f"{_SUBMIT}; {_END}")
        sys.stdout.flush()

    async def run() -> None:
        runner = Bridge(options, ready, trouble)
        install_signals(runner)
        await runner.run()

    asyncio.run(run())
    say("stopped")


def start_detached(ctx: click.Context, options: BridgeOptions) -> None:
    """Start the same command in the background, and wait until the bridge is ready.

    Raises:
        CliError: A bridge runs on this home already.
        StartFailed: The bridge ended, or it was not ready within DETACH_SECONDS.
    """
    from rollyard_drivers.host.home import read_json

    from rollyard import detached

    home = bridge_home(options.home)
    running = home.supervisor()
    if running is not None:
        raise CliError(
            f"a bridge runs already on {home.root} (process {running.pid}); "
            "stop it with `rollyard slurm-bridge down`",
            reason="HomeInUse",
        )
    home.make()

    def ready(pid: int) -> str:
        written = read_json(home.root / "bridge.json") or {}
        if written.get("pid") != pid:
            return ""
        return f"{_how(options)} {written['url']} (process {pid}, home {home.root})"

    arguments = ["slurm-bridge", "up", *detached.arguments_again(ctx, ("detach", "dry_run", "files"))]
    click.echo(detached.start(arguments, home.logs / "bridge.log", ready, DETACH_SECONDS))
    click.echo(f"Stop it with `rollyard slurm-bridge down --home {home.root}`")
