"""`rollyard slurm-bridge`: the same jobs and pools on a Slurm cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollyard import terminal

if TYPE_CHECKING:
    from rollyard_operator.host.home import Home
    from rollyard_slurm.options import BridgeOptions

DETACH_SECONDS = 120.0
DOWN_SECONDS = 240.0
HOME = click.option(
    "--home",
    type=click.Path(path_type=Path),
    help="State folder, on storage that the nodes share [~/.local/state/rollyard].",
)


@click.group()
def command() -> None:
    """Run jobs and backends on a Slurm cluster, from a login or service node, without root."""


def _home(given: Path | None) -> Home:
    from rollyard_operator.host.home import Home, default_home
    from rollyard_slurm.options import COMMAND

    return Home((given or default_home()).expanduser().absolute(), COMMAND)


@command.command()
@HOME
@click.option("--partition", metavar="NAME", help="Partition of all jobs; several with commas.")
@click.option("--account", metavar="NAME", help="Account that is charged.")
@click.option("--qos", metavar="NAME", help="Quality of service.")
@click.option("--time", "time_limit", metavar="LIMIT", help="Time limit of each job, as sbatch takes it.")
@click.option("--constraint", metavar="FEATURES", help="Node features.")
@click.option(
    "--start",
    type=click.Choice(["sbatch", "salloc"]),
    help="salloc: steps of allocations where Slurm grants them at once [sbatch].",
)
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
@click.option("--advertise", default="", metavar="HOST", help="Host that the nodes are told [--listen].")
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
    "--default-image", default="", metavar="SIF", help="Apptainer: image of rollouts that name none."
)
@click.option(
    "--image-cache",
    default="",
    metavar="DIR",
    help="Apptainer: built images, shared by the nodes [HOME/images].",
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
    type=click.FloatRange(1.0, 3600.0),
    default=30.0,
    show_default=True,
    help="After a worker's sudden end its rollouts go on elsewhere within this time.",
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
@click.option("--detach", is_flag=True, help="Return once it is ready; stop it with `slurm-bridge down`.")
@click.pass_context
def up(ctx: click.Context, /, **given: Any) -> None:
    """Start the control plane here, and workers and backends as Slurm jobs.

    Ctrl-C or `down` ends them all; SIGTERM ends the bridge alone, and the next `up` on the same
    home finds its Slurm jobs again.
    """
    options = _options(given)
    if given["dry_run"]:
        _dry_run(options, given["files"])
        return
    if given["files"]:
        from rollyard.errors import UsageProblem

        raise UsageProblem("--file goes with --dry-run; jobs are given with `rollyard submit -f`")
    if given["detach"]:
        _detach(ctx, options)
    else:
        _foreground(options)


def _options(given: dict[str, Any]) -> BridgeOptions:
    from rollyard_crds.base import NAME_PATTERN
    from rollyard_slurm import profile as profiles
    from rollyard_slurm.options import BridgeOptions

    from rollyard.errors import UsageProblem

    home = _home(given["home"]).root
    if bool(given["join"]) != (given["token_file"] is not None):
        raise UsageProblem("--join and --token-file belong together")
    if not given["join"] and (given["namespaces"] or given["all_namespaces"]):
        raise UsageProblem("--namespace and --all-namespaces go with --join")
    if given["join"] and bool(given["namespaces"]) == given["all_namespaces"]:
        raise UsageProblem(
            "--join needs --namespace NAME (repeatable) or --all-namespaces: whoever may make a BackendPool "
            "there can run programs as the user of this bridge"
        )
    for name in given["namespaces"]:
        if not re.fullmatch(NAME_PATTERN.strip("^$"), name):
            raise UsageProblem(f"--namespace must be a name such as team-a (got {name!r})")
    if given["join"] and given["engine"] != "none":
        raise UsageProblem(
            "--engine is for a control plane of its own; with --join, submit a BackendPool that says "
            "`placement: slurm`"
        )
    if given["join"] and not given["join"].startswith(("http://", "https://")):
        raise UsageProblem(f"--join must be a URL such as http://head:8765 (got {given['join']!r})")
    if given["listen"] == "unix" and (given["advertise"] or given["port"]):
        raise UsageProblem("--advertise and --port have no meaning with --listen unix")
    names = ("partition", "account", "qos", "time_limit", "constraint", "start")
    chosen = {name: given[name] for name in names}
    if given["rest_url"]:
        chosen["rest"] = {"url": given["rest_url"]}
    site = profiles.load(given["profile"], chosen)
    sandbox: list[str] = []
    for name, value in (("--default-image", given["default_image"]), ("--image-cache", given["image_cache"])):
        if value and given["sandbox"] != "apptainer":
            raise UsageProblem(f"{name} goes with --sandbox apptainer")
        if value:
            # `docker://NAME`, `docker-archive:/PATH` and the like are taken as they are.
            local = re.match(r"[a-z][a-z-]*:", value) is None
            sandbox += [name, str(Path(value).expanduser().absolute()) if local else value]
    if given["sandbox"] == "apptainer" and not given["image_cache"]:
        sandbox += ["--image-cache", str(home / "images")]
    return BridgeOptions(
        home=home,
        join=given["join"],
        tokens=given["token_file"],
        namespaces=tuple(given["namespaces"]),
        ca_file=given["ca_file"] if given["join"].startswith("https://") else None,
        listen=given["listen"],
        advertise=given["advertise"],
        port=given["port"],
        sandbox=given["sandbox"],
        sandbox_options=tuple(sandbox),
        profile=site,
        pools=_pools(given),
        lease_seconds=given["lease_seconds"],
        timeout=given["command_timeout"],
        max_jobs=given["max_jobs"],
    )


def _pools(given: dict[str, Any]) -> tuple[Any, ...]:
    from rollyard.errors import UsageProblem
    from rollyard.local.options import Options
    from rollyard.local.supervisor import default_pool

    engine, model = given["engine"], given["model"]
    for name, asked in (("--engine-arg", given["engine_args"]), ("--engine-env", given["engine_env"])):
        if asked and engine == "none":
            raise UsageProblem(f"{name} goes with --engine")
    if engine == "none":
        if model:
            raise UsageProblem("--model goes with --engine")
        return ()
    if given["gpus"] and engine != "vllm":
        raise UsageProblem("--gpus goes with --engine vllm")
    if engine == "vllm" and not model:
        raise UsageProblem("--engine vllm needs --model DIR, a Hugging Face model folder")
    wrong = next(
        (pair for pair in given["engine_env"] if not pair.partition("=")[0] or "=" not in pair), None
    )
    if wrong is not None:
        raise UsageProblem(f"--engine-env must be NAME=VALUE (got {wrong!r})")
    if model.startswith(("/", "~", ".")):
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise UsageProblem(f"--model: {folder} is no folder")
        model = str(folder)
    pairs = (pair.partition("=") for pair in given["engine_env"])
    options = Options(
        home=Path(),
        engine=engine,
        replicas=given["replicas"],
        engine_args=given["engine_args"],
        engine_env=tuple((name, value) for name, _, value in pairs),
        gpus=given["gpus"],
        model=model,
    )
    return (default_pool(options),)


def _dry_run(options: BridgeOptions, files: tuple[Path, ...]) -> None:
    import asyncio

    from rollyard_slurm.preview import sample_job, scripts

    from rollyard.manifests import read_manifests

    things = [thing for path in files for thing in read_manifests(path)] or [sample_job(), *options.pools]
    for text in asyncio.run(scripts(options, things)):
        click.echo(text)


_SUBMIT = "Submit with `rollyard submit -f job.yaml`"
_END = "Ctrl-C ends bridge and Slurm jobs."


def _how(options: BridgeOptions) -> str:
    return "The bridge has joined" if options.join else "Rollyard runs at"


def _foreground(options: BridgeOptions) -> None:
    import asyncio

    from rollyard_operator.host.store import RestStore
    from rollyard_slurm.bridge import Bridge, Ready, install_signals
    from rollyard_slurm.options import served

    def ready(what: Ready) -> None:
        click.echo(f"{_how(options)} {what.url}")
        click.echo(f"  sandbox  {options.sandbox}")
        click.echo(f"  home     {what.home.root}  (logs in {what.home.logs})")
        if what.found:
            click.echo(f"  {what.found} Slurm jobs of an earlier run go on")
        if options.join:
            click.echo(f"  serves   {served(options.namespaces)}")
            click.echo(
                "Their jobs and pools with `placement: slurm` run here; "
                "whoever may make a BackendPool there can run programs as you."
            )
        click.echo(_END if options.join else f"{_SUBMIT}; {_END}")
        sys.stdout.flush()

    async def run() -> None:
        bridge = Bridge(options, RestStore, ready, lambda line: terminal.echo_line(line, err=True))
        install_signals(bridge)
        await bridge.run()

    asyncio.run(run())
    click.echo("stopped")


def _arguments(ctx: click.Context) -> list[str]:
    """The command line again, without `--detach`."""
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in ("detach", "dry_run", "files"):
            continue
        flag = max(parameter.opts, key=len)
        if parameter.is_flag:
            words += [flag] if value else []
        elif parameter.multiple:
            words += [f"{flag}={item}" for item in value or ()]
        elif value not in (None, ""):
            words.append(f"{flag}={value}")
    return words


def _detach(ctx: click.Context, options: BridgeOptions) -> None:
    from rollyard_operator.host.home import read_json

    from rollyard import detached
    from rollyard.errors import HomeInUse

    home = _home(options.home)
    running = home.supervisor()
    if running is not None:
        raise HomeInUse(
            f"a bridge runs already on {home.root} (process {running.pid}); "
            "stop it with `rollyard slurm-bridge down`"
        )
    home.make()

    def ready(pid: int) -> str:
        told = read_json(home.root / "bridge.json") or {}
        if told.get("pid") != pid:
            return ""
        return f"{_how(options)} {told['url']} (process {pid}, home {home.root})"

    arguments = ["slurm-bridge", "up", *_arguments(ctx)]
    click.echo(detached.start(arguments, home.logs / "bridge.log", ready, DETACH_SECONDS))
    click.echo(f"Stop it with `rollyard slurm-bridge down --home {home.root}`")


@command.command()
@HOME
@click.option("--keep-jobs", is_flag=True, help="End the bridge alone; its Slurm jobs go on.")
def down(home: Path | None, keep_jobs: bool) -> None:
    """End the bridge of a home and its Slurm jobs. State and trajectories stay."""
    import asyncio
    import signal
    import time

    from rollyard_operator.host.processes import is_alive, send
    from rollyard_slurm.bridge import end_home
    from rollyard_slurm.options import BridgeOptions

    from rollyard.errors import CliError

    place = _home(home)
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

    place = _home(home)
    for line in asyncio.run(overview(place)):
        click.echo(line)
