"""The commands of `rollyard slurm-bridge` and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollyard import terminal
from rollyard.commands.slurm_bridge.options import bridge_home, bridge_options
from rollyard.commands.slurm_bridge.running import detach, dry_run, require_extras, run_here
from rollyard.commands.up import LEASE_SECONDS, NO_BACKEND_SECONDS
from rollyard.telemetry_options import telemetry_options

DOWN_SECONDS = 240.0
HOME = click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="State folder, on storage that the nodes share [~/.local/state/rollyard].",
)


@click.group()
def command() -> None:
    """Run jobs and backends on a Slurm cluster, from a login or service node, without root."""


@command.command()
@HOME
@click.option("--partition", metavar="NAME", help="Partition of all jobs; several with commas.")
@click.option("--account", metavar="NAME", help="Account that is charged.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit of each job, as sbatch takes it.")
@click.option("--constraint", metavar="FEATURES", help="Node features.")
@click.option(
    "--profile", type=click.Path(path_type=Path, dir_okay=False), help="YAML file with what this site needs."
)
@click.option(
    "--rest-url",
    metavar="URL",
    help="slurmrestd in place of Slurm's commands: unix:/PATH or http://HOST:PORT.",
)
@click.option(
    "--join", default="", metavar="URL", help="Use a control plane that runs, beside its other drivers."
)
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NAME",
    help="With --join: serve jobs and pools of this namespace; repeatable.",
)
@click.option(
    "--all-namespaces",
    is_flag=True,
    help="With --join: serve those of every namespace. Their authors can run programs as you.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="With --join: JSON with the tokens of driver and worker.",
)
@click.option(
    "--ca-file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="ROLLYARD_CA_FILE",
    help="With --join https://…: the authority of a private certificate (PEM).",
)
@click.option(
    "--listen",
    default="",
    metavar="ADDRESS",
    help="Address to listen on [that of this host's in the cluster]; `unix`: a socket, for one node.",
)
@click.option("--advertise", default="", metavar="HOST", help="Host name that the nodes use [--listen].")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="[that of the last run, else a free one]"
)
@click.option(
    "--sandbox",
    type=click.Choice(["apptainer", "bubblewrap", "process"]),
    default="apptainer",
    show_default=True,
    help="What isolates rollouts; `process` isolates nothing.",
)
@click.option(
    "--no-sandbox-templates",
    is_flag=True,
    help="bubblewrap: start each sandbox's server alone, with an address layout and a hash seed of its own.",
)
@click.option(
    "--default-image", default="", metavar="SIF", help="Apptainer: image of rollouts that name none."
)
@click.option(
    "--allow-image",
    "allow_images",
    multiple=True,
    metavar="IMAGE",
    help="What jobs may name as images: paths, docker://HOST/PREFIX/, none or any [any; with --join: none]; "
    "repeatable.",
)
@click.option(
    "--image-cache",
    default="",
    metavar="DIR",
    help="Apptainer: built images, shared by the nodes [HOME/images].",
)
@click.option(
    "--build-dockerfiles",
    is_flag=True,
    help="Apptainer: nodes build the images of tasks' Dockerfiles; their commands run there as you.",
)
@click.option(
    "--engine",
    type=click.Choice(["none", "embedded", "vllm"]),
    default="none",
    show_default=True,
    help="Make the BackendPool `default` with this engine.",
)
@click.option("--model", default="", help="Model folder of the pool `default`.")
@click.option("--replicas", type=click.IntRange(0, 1024), default=1, show_default=True, help="Its backends.")
@click.option("--gpus", type=click.IntRange(0, 64), default=0, help="vLLM: GPUs of each backend.")
@click.option(
    "--engine-arg", "engine_args", multiple=True, metavar="ARG", help="Argument of the engine; repeatable."
)
@click.option(
    "--engine-env", "engine_env", multiple=True, metavar="K=V", help="Environment of the engine; repeatable."
)
@click.option(
    "--lease-seconds",
    type=LEASE_SECONDS,
    default=30.0,
    show_default=True,
    help="After a worker's sudden end its rollouts continue elsewhere within this time.",
)
@click.option(
    "--allow-rewards-from",
    multiple=True,
    metavar="URL",
    help="What `reward.service.url` of jobs may begin with, as http://127.0.0.1:9000/; repeatable.",
)
@click.option(
    "--allow-rewards-network",
    "allow_rewards_networks",
    multiple=True,
    metavar="CIDR",
    help="Network in which these services may be, beside public addresses; repeatable.",
)
@click.option(
    "--no-backend-seconds",
    type=NO_BACKEND_SECONDS,
    help="While no backend is ready, rollouts of a job without a deadline wait so long, and then fail "
    "[3600]. Not with --join.",
)
@click.option(
    "--allow-sandbox-host",
    "allow_sandbox_hosts",
    multiple=True,
    metavar="HOST",
    help="A host that jobs may open to their sandboxes: a name, '*.example.org', or '*' for every public "
    "one. 'pypi.org=10.1.2.3' lets it have an address that is not public; repeatable [none]. Not with "
    "--join.",
)
@click.option(
    "--allow-eval-host",
    "allow_eval_hosts",
    multiple=True,
    metavar="HOST",
    help="A host that jobs may open to their hidden tests, in the same form; repeatable [none]. Not "
    "with --join.",
)
@click.option(
    "--command-timeout",
    type=click.FloatRange(1.0, 600.0),
    default=20.0,
    show_default=True,
    help="Seconds for one Slurm command.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(1, 10_000),
    default=16,
    show_default=True,
    help="RolloutJobs that are active at once; others wait.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the batch scripts of --file, or of a sample; start nothing."
)
@click.option(
    "-f", "--file", "files", multiple=True, type=click.Path(path_type=Path), help="With --dry-run: manifests."
)
@telemetry_options
@click.option("--detach", is_flag=True, help="Return once it is ready; stop it with `slurm-bridge down`.")
@click.pass_context
def up(ctx: click.Context, /, **given: Any) -> None:
    """Start the control plane here, and workers and backends as Slurm jobs.

    Ctrl-C or `down` ends them all; SIGTERM ends the bridge alone, and the next `up` on the same
    home finds its Slurm jobs again.
    """
    options = bridge_options(given)
    if given["dry_run"]:
        dry_run(options, given["files"])
        return
    require_extras(options, given["engine"])
    if given["files"]:
        from rollyard.errors import UsageProblem

        raise UsageProblem("--file goes with --dry-run; jobs are given with `rollyard submit -f`")
    if given["detach"]:
        detach(ctx, options)
    else:
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
