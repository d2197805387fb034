"""The command line of a stage worker."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard_crds.names import NODE, PROVIDER, STAGES, StageName
from rollyard_process.telemetry.options import add_log_option, add_trace_options

from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.sandboxes import PROVIDERS
from rollyard_pipeline.sandboxes.allowed_images import ANY
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions

if TYPE_CHECKING:
    from rollyard_crds.workers import Assignment

_DEFAULT_HOME: Final = "~/.local/state/rollyard"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, as `--help` lists them. If they cannot be parsed, argparse ends the process."""
    options = _with_node(_parser().parse_args(arguments))
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


def parse_known(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a worker that knows no control plane yet.

    `chat_format` is the tokenizer that it loads in advance, or None.
    """
    parser = _parser(ready=True)
    parser.add_argument("--chat-format")
    return _with_node(parser.parse_args(arguments))


def _with_node(options: argparse.Namespace) -> argparse.Namespace:
    if options.node is None:
        options.node = NODE if options.sandbox == PROVIDER else socket.gethostname()
    return options


def assigned_options(options: argparse.Namespace, assignment: Assignment) -> argparse.Namespace:
    """Return the options of a ready worker after its assignment, whose arguments replace its own.

    Raises:
        PipelineError: The arguments are not those of a worker of the assigned job, or name an address or a
            token that is not part of an assignment.
    """
    fixed = ("url", "token_file", "run_dir", "sandbox", "node", "ready", "otlp_endpoint")
    try:
        parser = _parser(exit_on_error=False)
        assigned, unknown = parser.parse_known_args([*options.given, *assignment.arguments])
    except argparse.ArgumentError as error:
        raise PipelineError(
            f"the assignment has arguments that cannot be used: {error}", "OptionInvalid"
        ) from error
    if unknown:
        raise PipelineError(
            f"the assignment has arguments that are not known here: {' '.join(unknown)}", "OptionInvalid"
        )
    if assigned.node is None:
        assigned.node = options.node
    for name in fixed:
        if getattr(assigned, name) != getattr(options, name):
            raise PipelineError(f"the assignment may not change --{name.replace('_', '-')}", "OptionInvalid")
    if (assigned.job, assigned.namespace) != (assignment.job, options.namespace):
        raise PipelineError(
            f"the assignment is to job {assignment.job} in namespace {options.namespace}, and its arguments "
            f"name job {assigned.job} in namespace {assigned.namespace}",
            "OptionInvalid",
        )
    return assigned


def stages_of(text: str) -> list[StageName]:
    """Return the stages that `--stages` names, in the order in which a rollout passes through them.

    Raises:
        PipelineError: `text` names no stage, or something else.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(STAGES))
    if unknown or not names:
        raise PipelineError(
            f"--stages: {', '.join(unknown) or 'nothing'} given; expected some of {', '.join(STAGES)}",
            "OptionInvalid",
        )
    return [stage for stage in STAGES if stage in names]


def concurrency_of(text: str | None) -> dict[StageName, int]:
    """Return how many rollouts `--concurrency` allows at once in each of the stages that it names.

    Raises:
        PipelineError: `text` is not of the form `init=16,run=64`, or a number is out of range.
    """
    places: dict[StageName, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, count = part.partition("=")
        stage = next((stage for stage in STAGES if stage == name.strip()), None)
        if stage is None or not count.strip().isdigit() or not 1 <= int(count) <= 4096:
            raise PipelineError(
                f"--concurrency: '{part}'; expected for example init=16,run=64,eval=16 (1 to 4096)",
                "OptionInvalid",
            )
        places[stage] = int(count)
    return places


def apptainer_options(options: argparse.Namespace) -> ApptainerOptions | None:
    """Return the options for Apptainer, or None if the sandboxes are of another kind.

    Raises:
        PipelineError: An option for Apptainer was given together with another kind of sandbox.
    """
    apptainer_only = {
        "--default-image": options.default_image,
        "--image-cache": options.image_cache,
        "--apptainer": options.apptainer,
        "--fakeroot": options.fakeroot,
        "--build-dockerfiles": options.build_dockerfiles,
    }
    if options.sandbox != "apptainer":
        for name, value in apptainer_only.items():
            if value:
                raise PipelineError(
                    f"{name} goes with --sandbox apptainer (got --sandbox {options.sandbox})", "OptionInvalid"
                )
        return None
    return ApptainerOptions(
        program=options.apptainer,
        default_image=options.default_image,
        image_cache=options.image_cache,
        image_cache_bytes=options.image_cache_gib << 30,
        fakeroot=options.fakeroot,
        build_dockerfiles=options.build_dockerfiles,
    )


def images_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return what jobs may name as images on this node.

    Raises:
        PipelineError: Another program than this worker fetches the images.
    """
    if options.allow_images and options.sandbox == PROVIDER:
        raise PipelineError(
            f"--allow-image: the cluster fetches the images of --sandbox {PROVIDER}", "OptionInvalid"
        )
    return tuple(options.allow_images or (ANY,))


def read_token(file: Path) -> str:
    """Return the token in `file`, which holds either the token alone or a tokens.json.

    Raises:
        PipelineError: The file cannot be read, or holds no token of a worker.
    """
    try:
        text = file.read_text().strip()
    except OSError as error:
        raise PipelineError(
            f"--token-file: {file} cannot be read: {error.strerror}", "OptionInvalid"
        ) from error
    if not text.startswith("{"):
        return text
    try:
        token = json.loads(text)["worker"]
        if isinstance(token, list):
            token = token[0]  # This is the valid token that is not about to be retired.
    except (ValueError, LookupError) as error:
        raise PipelineError(
            f"--token-file: {file} holds no token of the role 'worker'", "OptionInvalid"
        ) from error
    return str(token)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser(*, ready: bool = False, exit_on_error: bool = True) -> argparse.ArgumentParser:
    home = Path(os.environ.get("ROLLYARD_HOME") or _DEFAULT_HOME).expanduser()
    host = socket.gethostname()
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_pipeline",
        description="A Rollyard stage worker.",
        exit_on_error=exit_on_error,
    )
    parser.add_argument("--url", required=not ready, help="the control plane, http://HOST:PORT")
    parser.add_argument(
        "--token-file", required=not ready, type=Path, help="tokens.json, or a file with just the token"
    )
    parser.add_argument("--job", help="work for this job only, and exit when it is over")
    parser.add_argument("--namespace", default="default")
    parser.add_argument(
        "--ready",
        metavar="NAME",
        help="stand ready under this name: import everything, wait until a driver assigns a job of the "
        "namespace, work for it, and exit when it is over; the token is that of the ready worker",
    )
    parser.add_argument("--stages", default=",".join(STAGES), help="pools to run, default: %(default)s")
    parser.add_argument(
        "--concurrency", help="places per stage, as init=16,run=64,eval=16; default: the job's"
    )
    parser.add_argument("--run-dir", type=Path, default=home / "run", help="default: %(default)s")
    parser.add_argument(
        "--sandbox",
        choices=PROVIDERS,
        default="bubblewrap",
        help="kubernetes: pods that the operator starts; with it --node is kubernetes too",
    )
    parser.add_argument(
        "--no-sandbox-templates",
        action="store_false",
        dest="sandbox_templates",
        help="bubblewrap: start bwrap and Python for each sandbox, and fork none from a loaded exec server",
    )
    parser.add_argument(
        "--default-image",
        metavar="IMAGE",
        help="apptainer: the image of jobs that name none: a SIF file, a root folder, docker://NAME, …",
    )
    parser.add_argument(
        "--allow-image",
        action="append",
        dest="allow_images",
        metavar="IMAGE",
        help="what jobs and tasks may name as their image: the path of an image or of a folder with images, "
        "docker://HOST/PREFIX/, none or any; repeatable, default: any",
    )
    parser.add_argument(
        "--image-cache",
        type=Path,
        metavar="DIR",
        help="apptainer: where images built from others are kept, best on storage that the nodes share; "
        "default: in the run dir",
    )
    parser.add_argument(
        "--image-cache-gib",
        type=_positive,
        default=100,
        metavar="N",
        help="apptainer: beyond it the images that were not used for longest go, default: %(default)s",
    )
    parser.add_argument(
        "--apptainer", metavar="PROGRAM", help="default: apptainer, else singularity, from PATH"
    )
    parser.add_argument(
        "--fakeroot",
        action="store_true",
        help="apptainer: programs inside are root of their image and may change all of it",
    )
    parser.add_argument(
        "--build-dockerfiles",
        action="store_true",
        help="apptainer: build the images of tasks' Dockerfiles; their commands run here as this user",
    )
    parser.add_argument(
        "--max-sandboxes", type=int, help="claimed at once on this node; default: by concurrency"
    )
    parser.add_argument(
        "--sandboxes-end",
        action="store_true",
        help="sandboxes end with the worker that started them, as in a batch job",
    )
    parser.add_argument(
        "--trouble-file",
        type=Path,
        metavar="FILE",
        help="says why this worker takes no Init work; gone while nothing is wrong",
    )
    parser.add_argument("--node", help=f"default: {host}; of workers with --sandbox kubernetes: {NODE}")
    parser.add_argument("--name", default=f"{host}-{os.getpid()}-{secrets.token_hex(3)}")
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument(
        "--request-timeout", type=float, default=300.0, help="seconds for one backend request"
    )
    parser.add_argument("--backend-budget", type=float, default=60.0, help="seconds without any backend")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add_log_option(parser)
    add_trace_options(parser)
    return parser
