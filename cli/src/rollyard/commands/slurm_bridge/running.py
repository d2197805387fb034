"""Functions that run the bridge in this terminal or in the background, or that print its batch scripts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollyard import terminal
from rollyard.commands.slurm_bridge.options import bridge_home
from rollyard.telemetry_options import speaker

if TYPE_CHECKING:
    from rollyard_slurm.options import BridgeOptions

DETACH_SECONDS = 120.0
_SUBMIT = "Submit with `rollyard submit -f job.yaml`"
_END = "Ctrl-C ends bridge and Slurm jobs."


def print_scripts(options: BridgeOptions, files: tuple[Path, ...]) -> None:
    """Print the batch scripts of the manifests in `files`, or of a sample job, and start nothing."""
    import asyncio

    from rollyard_slurm.preview import sample_job, scripts

    from rollyard.jobs.manifests import read_manifests

    things = [thing for path in files for thing in read_manifests(path)] or [sample_job(), *options.pools]
    for text in asyncio.run(scripts(options, things)):
        click.echo(text)


def require_extras(options: BridgeOptions, engine: str) -> None:
    """Check that the packages are installed which the bridge, its control plane and its jobs need.

    Jobs whose profile names another Python bring their own.

    Raises:
        MissingExtra: A package is missing.
    """
    from rollyard.extras import require

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

    from rollyard_drivers.loop.rest_store import RestStore
    from rollyard_slurm.bridge import Bridge, BridgeReady, install_signals
    from rollyard_slurm.options import served

    say = speaker(click.echo, "rollyard.slurm-bridge")
    trouble = speaker(lambda line: terminal.echo_line(line, err=True), "rollyard.slurm-bridge")

    def ready(what: BridgeReady) -> None:
        say(f"{_how(options)} {what.url}")
        say(f"  sandbox  {options.sandbox}")
        say(f"  home     {what.home.root}  (logs in {what.home.logs})")
        if what.found:
            say(f"  {what.found} Slurm jobs of an earlier run continue")
        if options.join:
            say(f"  serves   {served(options.namespaces)}")
            say(
                "Their jobs and pools with `placement: slurm` run here; "
                "a user who may make a BackendPool there can run programs as you."
            )
        say(_END if options.join else f"{_SUBMIT}; {_END}")
        sys.stdout.flush()

    async def run() -> None:
        bridge = Bridge(options, RestStore, ready, trouble)
        install_signals(bridge)
        await bridge.run()

    asyncio.run(run())
    say("stopped")


def start_detached(ctx: click.Context, options: BridgeOptions) -> None:
    """Start the same command in the background, and wait until the bridge is ready.

    Raises:
        HomeInUse: A bridge runs on this home already.
        StartFailed: The bridge ended, or it was not ready within DETACH_SECONDS.
    """
    from rollyard_drivers.host.home import read_json

    from rollyard import detached
    from rollyard.declared import arguments_again
    from rollyard.errors import HomeInUse

    home = bridge_home(options.home)
    running = home.supervisor()
    if running is not None:
        raise HomeInUse(
            f"a bridge runs already on {home.root} (process {running.pid}); "
            "stop it with `rollyard slurm-bridge down`"
        )
    home.make()

    def ready(pid: int) -> str:
        written = read_json(home.root / "bridge.json") or {}
        if written.get("pid") != pid:
            return ""
        return f"{_how(options)} {written['url']} (process {pid}, home {home.root})"

    arguments = ["slurm-bridge", "up", *arguments_again(ctx, ("detach", "dry_run", "files"))]
    click.echo(detached.start(arguments, home.logs / "bridge.log", ready, DETACH_SECONDS))
    click.echo(f"Stop it with `rollyard slurm-bridge down --home {home.root}`")
