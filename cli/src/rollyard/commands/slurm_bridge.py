"""The commands of `rollyard slurm-bridge`.

They run the bridge in this terminal or in the background, print its batch scripts, end it, or show it. The
options of `up` are checked together and converted to those of the bridge.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import click
from pydantic import Field
from rollyard_api.options.command_line import GroupedCommand, declared_options
from rollyard_api.options.declared import (
    HTTP,
    STATE,
    TELEMETRY,
    Option,
    PlaneOptions,
    Port,
    document,
    key_of,
)
from rollyard_api.options.sources import drop_variables

from rollyard import terminal
from rollyard.declared import check_plugins, load_options, speaker
from rollyard.errors import CliError, UsageProblem
from rollyard.extras import require
from rollyard.local.options import (
    BACKENDS,
    SANDBOXES,
    EngineArgs,
    EngineEnv,
    Fakeroot,
    Gpus,
    Options,
    Replicas,
    SandboxTemplates,
    SandboxTools,
)

if TYPE_CHECKING:
    from rollyard_crds import BackendPool
    from rollyard_drivers.host.home import Home
    from rollyard_slurm.options import BridgeOptions
    from rollyard_slurm.profile import SiteProfile


SLURM: Final = "Slurm"
HUB_VARIABLES: Final = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE")
"""The variables of huggingface_hub that the bridge passes to its workers. Tokens are not among them."""
JOINING: Final = "A running control plane"


def bridge_home(home: Path | None) -> Home:
    """Return the home that `--home` names, or the default one."""
    from rollyard_drivers.host.home import Home, default_home
    from rollyard_slurm.options import COMMAND

    return Home((home or default_home()).expanduser().absolute(), COMMAND)


class BridgeCommandOptions(PlaneOptions):
    """The options of `rollyard slurm-bridge up`."""

    prefix: ClassVar[str] = "ROLLYARD_SLURM_BRIDGE_"

    home: Annotated[
        Path | None,
        Option(
            "State folder, on storage that the nodes share",
            STATE,
            metavar="DIR",
            elsewhere=("ROLLYARD_HOME",),
            default="~/.local/state/rollyard",
        ),
    ] = None

    partition: Annotated[str, Option("Partition of all jobs; several with commas", SLURM, metavar="NAME")] = (
        ""
    )
    account: Annotated[str, Option("Account that is charged", SLURM, metavar="NAME")] = ""
    qos: Annotated[str, Option("Quality of service", SLURM, metavar="NAME")] = ""
    time_limit: Annotated[
        str, Option("Time limit of each job, as sbatch takes it", SLURM, flag="--time", metavar="LIMIT")
    ] = ""
    constraint: Annotated[str, Option("Node features", SLURM, metavar="FEATURES")] = ""
    profile: Annotated[
        Path | None, Option("YAML file with what this site needs", SLURM, metavar="FILE", default="none")
    ] = None
    rest_url: Annotated[
        str,
        Option(
            "slurmrestd instead of Slurm's commands: unix:/PATH or http://HOST:PORT", SLURM, metavar="URL"
        ),
    ] = ""
    command_timeout: Annotated[float, Field(ge=1, le=600), Option("Seconds for one Slurm command", SLURM)] = (
        20.0
    )
    max_jobs: Annotated[
        int, Field(ge=1, le=10_000), Option("RolloutJobs that are active at once; others wait", SLURM)
    ] = 16

    join: Annotated[
        str, Option("Use a running control plane, alongside its other drivers", JOINING, metavar="URL")
    ] = ""
    namespaces: Annotated[
        tuple[str, ...],
        Option(
            "With --join: serve jobs and pools of this namespace; repeatable",
            JOINING,
            flag="--namespace",
            metavar="NAME",
        ),
    ] = ()
    all_namespaces: Annotated[
        bool,
        Option("With --join: serve those of every namespace; their authors can run programs as you", JOINING),
    ] = False
    token_file: Annotated[
        Path | None,
        Option(
            "With --join: JSON with the tokens of driver and worker", JOINING, metavar="FILE", default="none"
        ),
    ] = None
    ca_file: Annotated[
        Path | None,
        Option(
            "With --join https://… or --tls-cert: the authority of a private certificate (PEM)",
            JOINING,
            metavar="FILE",
            variable="ROLLYARD_CA_FILE",
            default="public ones",
        ),
    ] = None

    listen: Annotated[
        str,
        Option(
            "Address to listen on; `unix`: a socket, for one node",
            HTTP,
            metavar="ADDRESS",
            default="this host's address in the cluster",
        ),
    ] = ""
    advertise: Annotated[
        str, Option("Host name that the nodes use", HTTP, metavar="HOST", default="--listen")
    ] = ""
    port: Annotated[Port, Option("Port", HTTP, default="the port of the last run, else a free one")] = 0

    sandbox: Annotated[
        Literal["apptainer", "bubblewrap", "process"],
        Option("What isolates rollouts; `process` isolates nothing", SANDBOXES),
    ] = "apptainer"
    sandbox_templates: SandboxTemplates = True
    sandbox_tools: SandboxTools = None
    default_image: Annotated[
        str, Option("Apptainer: image of rollouts that name none", SANDBOXES, metavar="SIF")
    ] = ""
    allow_images: Annotated[
        tuple[str, ...],
        Option(
            "What jobs may name as images: paths, docker://HOST/PREFIX/, none or any; repeatable",
            SANDBOXES,
            flag="--allow-image",
            metavar="IMAGE",
            default="any; with --join: none",
        ),
    ] = ()
    image_cache: Annotated[
        str,
        Option(
            "Apptainer: built images, shared by the nodes", SANDBOXES, metavar="DIR", default="HOME/images"
        ),
    ] = ""
    fakeroot: Fakeroot = False
    build_dockerfiles: Annotated[
        bool,
        Option(
            "Apptainer: nodes build the images of tasks' Dockerfiles; their commands run there as you",
            SANDBOXES,
        ),
    ] = False

    engine: Annotated[
        Literal["none", "embedded", "vllm"],
        Option("Make the BackendPool `default` with this engine", BACKENDS),
    ] = "none"
    model: Annotated[
        str,
        Option(
            "Model of the pool `default`: a folder, or OWNER/NAME[@REVISION] of the Hugging Face Hub",
            BACKENDS,
            metavar="MODEL",
        ),
    ] = ""
    replicas: Replicas = 1
    gpus: Gpus = 0
    engine_args: EngineArgs = ()
    engine_env: EngineEnv = ()


def bridge_options(options: BridgeCommandOptions) -> BridgeOptions:
    """Return the options of the bridge from those of its command.

    Raises:
        UsageProblem: Options contradict each other, or one of them has a value that cannot be used.
    """
    from rollyard_crds.base import NAME_PATTERN
    from rollyard_slurm import profile as profiles
    from rollyard_slurm.options import BridgeOptions

    from rollyard.declared import set_telemetry

    home = bridge_home(options.home).root
    if bool(options.join) != (options.token_file is not None):
        raise UsageProblem("--join and --token-file belong together")
    if not options.join and (options.namespaces or options.all_namespaces):
        raise UsageProblem("--namespace and --all-namespaces go with --join")
    if options.join and bool(options.namespaces) == options.all_namespaces:
        raise UsageProblem(
            "--join needs --namespace NAME (repeatable) or --all-namespaces: a user who may make a "
            "BackendPool there can run programs as the user of this bridge"
        )
    for name in options.namespaces:
        if not re.fullmatch(NAME_PATTERN.strip("^$"), name):
            raise UsageProblem(f"--namespace must be a name such as team-a (got {name!r})")
    if options.join and options.engine != "none":
        raise UsageProblem(
            "--engine is for a control plane of its own; with --join, submit a BackendPool that says "
            "`placement: slurm`"
        )
    if options.join and not options.join.startswith(("http://", "https://")):
        raise UsageProblem(f"--join must be a URL such as http://head:8765 (got {options.join!r})")
    if options.join:
        _refuse_options_of_a_plane(options)
    else:
        check_plugins(options.plugins)
    if options.listen == "unix" and (options.advertise or options.port):
        raise UsageProblem("--advertise and --port have no meaning with --listen unix")
    if options.listen == "unix" and options.tls_cert is not None:
        raise UsageProblem("--tls-cert has no meaning with --listen unix")
    variables = set_telemetry(options.otlp_endpoint, options.trace_sample, options.log_format)
    names = ("partition", "account", "qos", "time_limit", "constraint")
    chosen: dict[str, Any] = {name: getattr(options, name) or None for name in names}
    if options.rest_url:
        chosen["rest"] = {"url": options.rest_url}
    profile = profiles.load(options.profile, chosen)
    serves_tls = options.join.startswith("https://") or options.tls_cert is not None
    return BridgeOptions(
        home=home,
        join=options.join,
        tokens=options.token_file,
        namespaces=options.namespaces,
        ca_file=options.ca_file if serves_tls else None,
        listen=options.listen,
        advertise=options.advertise,
        port=options.port,
        sandbox=options.sandbox,
        sandbox_options=tuple(_sandbox_options(options, home)),
        profile=profile,
        hub=_hub(profile),
        telemetry=tuple(sorted(variables.items())),
        pools=_pools(options),
        plane=document(options),
        timeout=options.command_timeout,
        max_jobs=options.max_jobs,
    )


def _hub(profile: SiteProfile) -> tuple[tuple[str, str], ...]:
    """Return the variables by which the bridge and its workers find the cache of the Hugging Face Hub.

    The profile's `env` takes precedence over the environment of the bridge. The default of HF_HOME is that of
    the library, in the home directory.
    """
    known = {name: value for name in HUB_VARIABLES if (value := os.environ.get(name))}
    known |= {name: value for name, value in profile.env.items() if name in HUB_VARIABLES}
    known.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    return tuple(sorted(known.items()))


def _refuse_options_of_a_plane(options: BridgeCommandOptions) -> None:
    """Refuse options of a control plane that is not the bridge's own.

    Those of traces and logs are the bridge's and its workers' as well.
    """
    for name, field in PlaneOptions.model_fields.items():
        if name in options.model_fields_set and name not in TELEMETRY:
            raise UsageProblem(
                f"--{key_of(name, field)} is for a control plane of its own; the one that --join names has "
                "its own"
            )


def _sandbox_options(options: BridgeCommandOptions, home: Path) -> list[str]:
    """Return the options of stage workers about their sandboxes."""
    words: list[str] = []
    if not options.sandbox_templates:
        if options.sandbox != "bubblewrap":
            raise UsageProblem("--no-sandbox-templates goes with --sandbox bubblewrap")
        words.append("--no-sandbox-templates")
    if options.sandbox_tools is not None:
        if options.sandbox == "process":
            raise UsageProblem("--sandbox-tools goes with --sandbox bubblewrap or apptainer")
        words += ["--sandbox-tools", str(options.sandbox_tools)]
    words += _allowed_images(options)
    for name, value in (("--default-image", options.default_image), ("--image-cache", options.image_cache)):
        if value and options.sandbox != "apptainer":
            raise UsageProblem(f"{name} goes with --sandbox apptainer")
        if value:
            # `docker://NAME`, `docker-archive:/PATH` and similar sources are not paths and stay unchanged.
            local = re.match(r"[a-z][a-z-]*:", value) is None
            words += [name, str(Path(value).expanduser().absolute()) if local else value]
    for name, is_set in (
        ("--fakeroot", options.fakeroot),
        ("--build-dockerfiles", options.build_dockerfiles),
    ):
        if is_set and options.sandbox != "apptainer":
            raise UsageProblem(f"{name} goes with --sandbox apptainer")
        if is_set:
            words.append(name)
    if options.sandbox == "apptainer" and not options.image_cache:
        words += ["--image-cache", str(home / "images")]
    return words


def _allowed_images(options: BridgeCommandOptions) -> list[str]:
    """Return the workers' options about the images that jobs may name.

    Whoever uses the bridge's own control plane holds this user's token. Authors of a control plane that the
    bridge joins do not, and an image may show them files of this user.
    """
    entries = list(options.allow_images) or (["none"] if options.join else [])
    words = []
    for entry in entries:
        alone = entry in ("any", "none")
        if alone and len(entries) > 1:
            raise UsageProblem(f"--allow-image {entry} stands alone")
        if not alone and ":" in entry and not re.match(r"(docker|oras|library|shub)://[^\s/]", entry):
            raise UsageProblem(
                f"--allow-image {entry}: give a path, or a reference such as docker://HOST/PREFIX/; a path "
                "also allows the archives below it"
            )
        reference = alone or "://" in entry
        words += ["--allow-image", entry if reference else str(Path(entry).expanduser().absolute())]
    return words


def _pools(command_options: BridgeCommandOptions) -> tuple[BackendPool, ...]:
    from rollyard.local.supervisor import default_pool

    engine, model = command_options.engine, command_options.model
    for name, value in (
        ("--engine-arg", command_options.engine_args),
        ("--engine-env", command_options.engine_env),
    ):
        if value and engine == "none":
            raise UsageProblem(f"{name} goes with --engine")
    if engine == "none":
        if model:
            raise UsageProblem("--model goes with --engine")
        return ()
    if command_options.gpus and engine != "vllm":
        raise UsageProblem("--gpus goes with --engine vllm")
    if engine == "vllm" and not model:
        raise UsageProblem("--engine vllm needs --model, a folder or a model of the Hugging Face Hub")
    if model.startswith(("/", "~", ".")):
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise UsageProblem(f"--model: {folder} is not a folder")
        model = str(folder)
    options = Options(
        home=Path(),
        engine=engine,
        replicas=command_options.replicas,
        engine_args=command_options.engine_args,
        engine_env=command_options.engine_env,
        gpus=command_options.gpus,
        model=model,
    )
    return (default_pool(options),)


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

    from rollyard_slurm.bridge import sample_job, scripts

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

    os.environ.update(options.hub)  # Before the library is imported, which reads them only then.

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
