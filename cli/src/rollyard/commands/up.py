"""The command `rollyard up`, which runs everything on this machine, in the foreground or detached."""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rollyard_api.options.command_line import GroupedCommand, declared_options
from rollyard_api.options.sources import drop_variables

from rollyard import terminal
from rollyard.declared import check_plugins, set_telemetry, speaker
from rollyard.errors import UsageProblem
from rollyard.local.options import (
    BACKENDS,
    SANDBOXES,
    WORKERS,
    Engine,
    Options,
    check_model_folder,
    is_for_vllm,
    whole_path,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollyard_process.hub_names import HubName

DETACH_SECONDS: Final = 90.0
MODEL_SECONDS: Final = 60.0
"""The time in seconds after which `--detach` returns even if no backend is ready. vLLM may load a model for
minutes."""
PROGRAM: Final = "rollyard up"


@click.command(
    cls=GroupedCommand,
    most_used=("backend_url", "model", "plugins", "home", "detach"),
    first_groups=(BACKENDS, SANDBOXES, WORKERS),
)
@declared_options(Options)
@click.option("--detach", is_flag=True, help="Return once a backend is ready; stop it with `rollyard down`.")
@click.pass_context
def up(ctx: click.Context, /, config: Path | None, detach: bool, **arguments: Any) -> None:
    """Start control plane, workers and a backend on this machine; Ctrl-C stops everything.

    With vLLM: `rollyard up --model Qwen/Qwen3-8B --replicas 2 --gpus 1
    --engine-arg=--max-model-len=32768`. `$(BACKEND_INDEX)` in --engine-arg and --engine-env is
    the replica's number, from 0. The options from "State" on are those of `rollyard control-plane`.
    """
    from rollyard.declared import load_options
    from rollyard.extras import require

    embedded = (
        ("engine",) if arguments["engine"] in (None, "embedded") and not arguments["backend_url"] else ()
    )
    require("`rollyard up`", "local", "api", "worker", "sandbox", *embedded)
    options = load_options(Options, arguments, config, PROGRAM)
    if options.engine == "embedded" and not options.backend_url:
        require("`rollyard up`", "local", "engine")
    # Every process that is started inherits the environment.
    set_telemetry(options.otlp_endpoint, options.trace_sample, options.log_format)
    options = _checked(options)
    if detach:
        _detach(ctx, options)
        return
    import asyncio

    from rollyard.local.supervisor import run_supervisor

    drop_variables(Options, os.environ)
    asyncio.run(run_supervisor(options, speaker(click.echo, "rollyard.up")))


def _checked(options: Options) -> Options:
    """Return the options with absolute paths, and with what a running server says about its model.

    Raises:
        UsageProblem: Options contradict each other, or name something that cannot be used.
    """
    url, model, engines = options.backend_url, options.model, _engines(options)
    engine = engines[0]
    if url:
        from rollyard.local.external_server import check_url

        check_url("--backend", url)
    for name, useless in (
        ("--engine", engine != "embedded"),
        ("--replicas", options.replicas != 1),
        ("--engine-arg", bool(options.engine_args)),
        ("--engine-env", bool(options.engine_env)),
    ):
        if url and useless:
            raise UsageProblem(f"{name} is for backends that are started here; --backend names a running one")
    apptainer = options.sandbox == "apptainer"
    for name, needs, useless in (
        ("--vllm-python", "--engine vllm", engine != "vllm" and bool(options.vllm_python)),
        ("--gpus", "--engine vllm", engine != "vllm" and bool(options.gpus)),
        (
            "--default-image",
            "--sandbox apptainer, docker or podman",
            options.sandbox in ("bubblewrap", "process") and bool(options.default_image),
        ),
        ("--image-cache", "--sandbox apptainer", not apptainer and options.image_cache is not None),
        (
            "--fakeroot",
            "--sandbox apptainer, docker or podman",
            options.sandbox in ("bubblewrap", "process") and options.fakeroot,
        ),
        ("--build-dockerfiles", "--sandbox apptainer", not apptainer and options.build_dockerfiles),
        ("--prorl-config", "--prorl", not options.prorl and options.prorl_config is not None),
        (
            "--no-sandbox-templates",
            "--sandbox bubblewrap",
            not options.sandbox_templates and options.sandbox != "bubblewrap",
        ),
        (
            "--sandbox-tools",
            "--sandbox bubblewrap, apptainer, docker or podman",
            options.sandbox == "process" and options.sandbox_tools is not None,
        ),
    ):
        if useless:
            raise UsageProblem(f"{name} goes with {needs}")
    if engine == "vllm" and not model:
        raise UsageProblem("--engine vllm needs --model, a folder or a model of the Hugging Face Hub")
    check_plugins(options.plugins)
    changes: dict[str, Any] = {}
    if options.verify_python:
        program = shutil.which(Path(options.verify_python).expanduser())
        if program is None:
            raise UsageProblem(f"--verify-python: {options.verify_python} is not a program that can be run")
        # The path is not resolved, because the link in a virtual environment selects that environment.
        changes["verify_python"] = str(Path(program).absolute())
    if options.tokenizer and not url:
        raise UsageProblem("--tokenizer goes with --backend; an embedded engine reads its model folder")
    if model and not url:
        changes["model"], changes["engine"] = _local_model(model, engines, options.engine_args)
    if url:
        from rollyard.local.external_server import MAX_QUOTED, served, trains_line

        name, tokenizer = served(url, model, options.tokenizer)
        terminal.echo_line(f"{url} serves {name[:MAX_QUOTED]}, trains: {trains_line(url, name)}")
        terminal.echo_line(f"tokenizer: {tokenizer}")
        changes |= {"model": name, "tokenizer": tokenizer}
    return options.model_copy(update=changes)


def _engines(options: Options) -> tuple[Engine, ...]:
    """Return the engines that may serve the model: the chosen one, or else all that fit the other options."""
    if "engine" in options.model_fields_set or not options.model or options.backend_url:
        return (options.engine,)
    return ("vllm",) if options.gpus or options.vllm_python else ("embedded", "vllm")


def _local_model(model: str, engines: Sequence[Engine], engine_args: Sequence[str]) -> tuple[str, Engine]:
    """Return the folder or the name of a model, and the engine that serves it.

    A model of the hub is downloaded, in the foreground even with --detach.

    Raises:
        UsageProblem: There is no such model, or it lacks a file.
    """
    from rollyard_process.hub_names import hub_name

    folder = whole_path(Path(model))
    repository = None if folder.is_dir() else hub_name(model)
    if repository is not None:
        folder, engine = _downloaded(repository, engines)
    else:
        engine = engines[-1] if is_for_vllm(folder) else engines[0]
    check_model_folder(folder, engine, engine_args)
    return str(folder if repository is None else repository), engine


def _downloaded(repository: HubName, engines: Sequence[Engine]) -> tuple[Path, Engine]:
    """Return the folder of a model of the hub, and the first engine that can serve it."""
    from rollyard_process.hub import HubError, download

    engine, *others = engines
    try:
        return download(
            repository, engine, None if sys.stderr.isatty() else partial(click.echo, err=True)
        ), engine
    except HubError as error:
        if others and error.reason == "ModelUnsuitable":
            return _downloaded(repository, others)
        raise UsageProblem(f"--model: {error}", reason=error.reason) from error


def _detach(ctx: click.Context, options: Options) -> None:
    from rollyard_drivers.host.home import Home, default_home, read_json

    from rollyard import detached
    from rollyard.errors import CliError, StartFailed

    home = Home(options.home)
    running = home.supervisor()
    if running is not None:
        raise CliError(
            f"`rollyard up` runs already on {home.root} (process {running.pid}); stop it with "
            "`rollyard down`",
            reason="HomeInUse",
        )
    home.make()
    log = home.logs / "up.log"
    log.unlink(missing_ok=True)

    def ready(pid: int) -> str:
        context, supervisor = read_json(home.context_file), home.supervisor()
        if context is None or supervisor is None or supervisor.pid != pid:
            return ""
        runs = f"Rollyard runs at {context['url']} (process {pid}, home {home.root})"
        backends = read_json(home.backends_file) or {}
        if backends.get("trouble"):
            raise StartFailed(f"{backends['trouble']} (logs: {home.logs})")
        if not backends.get("ready") and time.monotonic() < begun + MODEL_SECONDS:
            return ""
        return runs if backends.get("ready") else f"{runs}; no backend is ready yet"

    arguments = ["up", *detached.arguments_again(ctx, ("detach",))]
    begun = time.monotonic()
    click.echo(detached.start(arguments, log, ready, DETACH_SECONDS))
    is_default = home.root == default_home().expanduser().resolve()
    click.echo(f"Stop it with `rollyard down{'' if is_default else f' --home {home.root}'}`")
