"""The program of a stage worker and its options. It runs alone, or in a process that stood ready for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop
from rollyard_crds.base import build_all
from rollyard_crds.names import NODE, PROVIDER, STAGES, StageName
from rollyard_crds.rolloutjob import DEFAULT_PLACES
from rollyard_crds.workers import Assignment, AssignmentRequest
from rollyard_process.log_text import log_to
from rollyard_process.open_files import open_many_files
from rollyard_process.telemetry.export import SpanExport, exporting
from rollyard_process.telemetry.options import TraceOptions, add_log_option, add_trace_options, trace_options
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.control_plane.calls import WorkerCalls, persistent
from rollyard_pipeline.control_plane.rest import RestControlPlane, import_late
from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import PROVIDERS, open_provider
from rollyard_pipeline.sandboxes.allowed_images import ANY
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.containers.engine import KINDS
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.host.cgroups import memory_limit
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.provider import WITHOUT_TOOLS, NodeProvider
from rollyard_pipeline.sandboxes.starters.runtime import TOOLS
from rollyard_pipeline.worker.worker import Worker, WorkerOptions

_DEFAULT_HOME: Final = "~/.local/state/rollyard"


log = logging.getLogger(__name__)

GARBAGE_THRESHOLD: Final = 10_000
"""The number of new objects after which the young ones are searched for cycles."""
SERVICE: Final = "rollyard-worker"
"""The attribute `service.name` of the spans that workers send."""
NODE_UNUSABLE: Final = 73
"""The exit status of a worker whose node lacks what sandboxes need (EX_CANTCREAT of sysexits.h).

Another node may have it.
"""
WAIT_SECONDS: Final = 30.0
"""The longest time that one request waits for an offer to a ready worker, in seconds."""
T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Run a worker and return its exit status.

    The status is 0 when the worker was drained, its job is over, or it was stopped while it stood ready. It
    is 2 when the options cannot be used, and 73 when this node cannot start sandboxes.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return _main(runner, parse(argv), Readiness())


def stand_ready(prepared: list[str], arguments: Callable[[], list[str] | None]) -> int:
    """Prepare what a worker of this machine needs, wait for the arguments of one, and run it.

    Args:
        prepared: The options of the worker that are known in advance, and `--chat-format NAME` for a
            tokenizer and chat template to load.
        arguments: Waits for the arguments. It returns None if none will come.

    Returns:
        The exit status, which is 0 if no arguments came; see `main`.
    """
    known = parse_known(prepared)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        ready = Readiness()
        runner.run(ready.prepare(_provider_settings(known), known.chat_format))
        # Nothing of this process runs while it waits, neither its event loop nor its threads.
        argv = arguments()
        if argv is None:
            runner.run(ready.aclose())
            return 0
        return _main(runner, parse(argv), ready)


def _main(runner: asyncio.Runner, options: argparse.Namespace, ready: Readiness) -> int:
    try:
        log_to(level=options.log_level.upper(), form=options.log_format)
    except TraceOptionError as error:
        print(f"rollyard worker: {error.reason}: {error}", file=sys.stderr)
        return 2
    open_many_files()  # A rollout in Run has a connection to its backend and one to its sandbox.
    # What the imports made stays until the end, and rollouts make few cycles.
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        return runner.run(_run(options, ready))
    except PipelineError as error:
        print(f"rollyard worker: {error.reason}: {error}", file=sys.stderr)
        return NODE_UNUSABLE if error.of_node else 2
    except TraceOptionError as error:
        print(f"rollyard worker: {error.reason}: {error}", file=sys.stderr)
        return 2


def _provider_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `open_provider`, except for the control plane's claims."""
    return {
        "name": options.sandbox,
        "run_dir": options.run_dir,
        "node": options.node,
        "apptainer": apptainer_options(options),
        "default_image": options.default_image,
        "fakeroot": options.fakeroot,
        "templates": options.sandbox_templates,
        "images": images_of(options),
        "tools": tools_of(options),
    }


async def _run(options: argparse.Namespace, ready: Readiness) -> int:
    _traces(options), stages_of(options.stages), concurrency_of(options.concurrency)  # Errors come early.
    with StopSignals() as signals:
        token = read_token(options.token_file)
        if options.ready is not None:
            try:
                assignment = await signals.wait(_assignment(options, token, ready))
            except BaseException:
                await ready.aclose()
                raise
            if assignment is None:
                await ready.aclose()
                return 0
            options, token = assigned_options(options, assignment), assignment.token
        requested, destination = bool(options.otlp_endpoint), _traces(options)
        with exporting(destination, SERVICE, options.name, required=requested) as traces:
            await _work(options, token, ready, signals, traces)
    return 0


def _traces(options: argparse.Namespace) -> TraceOptions:
    return trace_options(options.otlp_endpoint, options.trace_sample)


async def _work(
    options: argparse.Namespace,
    token: str,
    ready: Readiness,
    signals: StopSignals,
    traces: SpanExport | None,
) -> None:
    """Run the worker whose options and token are known."""
    stages, concurrency = stages_of(options.stages), concurrency_of(options.concurrency)
    async with RestControlPlane(options.url, token) as control:
        settings = _provider_settings(options)
        if options.sandbox == PROVIDER:
            settings["claims"] = control
        provider = await ready.provider(settings)
        # The provider waits for programs that it asks, and meanwhile a core is free.
        await asyncio.gather(provider.start(), asyncio.to_thread(control.prepare))
        try:
            places = await _places(options, control, stages, concurrency)
            async with BackendClient(stall_timeout=options.stall_timeout) as backends:
                await signals.run(
                    Worker(control, backends, provider, _worker_options(options, places, ready, traces))
                )
        finally:
            await provider.aclose()


async def _assignment(options: argparse.Namespace, token: str, ready: Readiness) -> Assignment:
    """Stand ready, and return the assignment once there is one.

    Raises:
        PipelineError: This node cannot start sandboxes.
        ControlPlaneRefused: The token is not that of this ready worker, or it is spent.
    """
    # An assigned worker begins at once.
    await asyncio.to_thread(import_late)
    await asyncio.to_thread(build_all)
    if options.sandbox == PROVIDER:
        with contextlib.suppress(Exception):  # The worker tries again, and reports the error.
            await asyncio.to_thread(ready.extensions.load_own)
    else:
        trouble = await ready.prepare(_provider_settings(options))
        if isinstance(trouble, PipelineError) and trouble.of_node:
            raise trouble  # No job should have to find out that this node is of no use.
    async with RestControlPlane(options.url, token) as control:
        driver = options.sandbox if options.sandbox == PROVIDER else ""
        return await assignment_of(control, options.namespace, options.ready, driver)


async def assignment_of(
    control: WorkerCalls, namespace: str, worker: str, driver: str, wait: float = WAIT_SECONDS
) -> Assignment:
    """Ask for the assignment of a ready worker until a driver has offered one.

    The worker stands ready as long as its driver lets it live. A control plane that does not answer is asked
    again with growing pauses.

    Raises:
        ControlPlaneRefused: The token is not valid, or the assignment was handed out or withdrawn before.
    """
    request = AssignmentRequest(namespace=namespace, worker=worker, driver=driver, wait=wait)
    while True:
        assignment = await persistent(lambda: control.assignment(request))
        if assignment is not None:
            return assignment


async def _places(
    options: argparse.Namespace,
    control: RestControlPlane,
    stages: list[StageName],
    concurrency: dict[StageName, int],
) -> dict[StageName, int]:
    """Return the places of each stage: the given ones, else those of the worker's own job, else the defaults.

    Raises:
        ControlPlaneRefused: The places were not given for every stage, and the job is gone.
    """
    places = dict(DEFAULT_PLACES)
    if options.job is not None and set(stages) - set(concurrency):
        spec = await control.job_when_there(options.namespace, options.job)
        places = {stage: spec.places(stage) for stage in stages}
    return {stage: concurrency.get(stage, places[stage]) for stage in stages}


def _worker_options(
    options: argparse.Namespace,
    places: dict[StageName, int],
    ready: Readiness,
    traces: SpanExport | None,
) -> WorkerOptions:
    return WorkerOptions(
        worker=options.name,
        node=options.node,
        concurrency=places,
        job=options.job,
        namespace=options.namespace if options.job is not None else None,
        max_sandboxes=options.max_sandboxes,
        memory=None if options.sandbox == PROVIDER else memory_limit(),
        sandboxes_end=options.sandboxes_end,
        trouble_file=options.trouble_file,
        drain_seconds=options.drain_seconds,
        backend_budget=options.backend_budget,
        extensions=ready.extensions,
        formats=ready.formats,
        # No sandbox reaches the receiver of traces, which may have no password.
        egress=Egress([options.url, *([_traces(options).url] if _traces(options).on else ())]),
        # The run folder is private, and was made with the sandboxes.
        plugin_folder=None if options.sandbox == PROVIDER else options.run_dir,
        traces=traces,
    )


class Readiness:
    """Prepared parts of one worker. All of them depend on this machine only, and on no job."""

    def __init__(self) -> None:
        self.extensions = Registry()
        self.formats = FormatCache()
        self._provider: SandboxProvider | None = None
        self._settings: dict[str, Any] = {}

    async def prepare(self, settings: Mapping[str, Any], tokenizer: str | None = None) -> Exception | None:
        """Prepare what can be prepared here. What fails is left to the worker, which reports its error.

        Args:
            settings: The arguments of `open_provider`.
            tokenizer: The tokenizer that jobs of this machine are likely to use, if one is known.

        Returns:
            The error for which sandboxes cannot be started, or None.
        """
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.extensions.load_own)
        if tokenizer is not None:
            with contextlib.suppress(Exception):
                await self.formats.load_ahead(tokenizer)
        provider: SandboxProvider | None = None
        try:
            provider = open_provider(**settings)
            if isinstance(provider, NodeProvider):
                await provider.stand_ready()
        except BaseException as error:
            if provider is not None:
                await provider.aclose()
            if not isinstance(error, Exception):
                raise
            log.debug("the sandboxes are not prepared: %s", error)
            return error
        self._provider, self._settings = provider, dict(settings)
        return None

    async def provider(self, settings: Mapping[str, Any]) -> SandboxProvider:
        """Return the prepared provider if it was opened with these settings, and else a new one.

        The caller owns it and starts it. This is called once.

        Raises:
            ValueError: See `open_provider`.
        """
        if self._provider is not None and self._settings != settings:
            await self.aclose()
        prepared, self._provider = self._provider, None
        return prepared if prepared is not None else open_provider(**settings)

    async def aclose(self) -> None:
        """End the provider if nobody has taken it."""
        provider, self._provider = self._provider, None
        if provider is not None:
            await provider.aclose()


class StopSignals:
    """Handles SIGTERM and SIGINT.

    The first signal drains the worker, the second has it hand over its rollouts at once, and the third stops
    it. The signals are handled from before the first sandbox starts until after the last one ends, because an
    unhandled signal during the clean-up would leave sandboxes behind.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._worker: Worker | None = None
        self._running: asyncio.Future[None] | None = None
        self._idle: asyncio.Future[Any] | None = None

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            if exc[0] is None:
                # The work is complete, so a signal during the exit must not make it a failure.
                signal.signal(number, signal.SIG_IGN)

    async def run(self, worker: Worker) -> None:
        """Run the worker until it ends."""
        self._worker = worker
        self._running = asyncio.ensure_future(worker.run())
        self._pass_on(worker)
        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 3:
                raise

    async def wait(self, idle: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of a coroutine that does no work, or None if a signal has ended it."""
        self._idle = asyncio.ensure_future(idle)
        if self._asked:
            self._idle.cancel()
        try:
            result: T = await self._idle
            return result
        except asyncio.CancelledError:
            if not self._asked:
                raise
            return None
        finally:
            self._idle = None

    def _stop(self) -> None:
        self._asked += 1
        if self._idle is not None:
            self._idle.cancel()
        if self._worker is not None:
            self._pass_on(self._worker)

    def _pass_on(self, worker: Worker) -> None:
        if self._asked == 1:
            worker.drain()
        elif self._asked == 2:
            worker.hand_over()
        elif self._asked > 2 and self._running is not None:
            self._running.cancel()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, as `--help` lists them. If they cannot be parsed, argparse ends the process."""
    options = _with_node(argument_parser().parse_args(arguments))
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


def parse_known(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a worker that knows no control plane yet.

    `chat_format` is the tokenizer that it loads in advance, or None.
    """
    parser = argument_parser(ready=True)
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
        parser = argument_parser(exit_on_error=False)
        assigned, unknown = parser.parse_known_args([*options.given, *assignment.arguments])
    except argparse.ArgumentError as error:
        raise PipelineError(
            f"the assignment has arguments that cannot be used: {error}", "InvalidOption"
        ) from error
    if unknown:
        raise PipelineError(
            f"the assignment has arguments that are not known here: {' '.join(unknown)}", "InvalidOption"
        )
    if assigned.node is None:
        assigned.node = options.node
    for name in fixed:
        if getattr(assigned, name) != getattr(options, name):
            raise PipelineError(f"the assignment may not change --{name.replace('_', '-')}", "InvalidOption")
    if (assigned.job, assigned.namespace) != (assignment.job, options.namespace):
        raise PipelineError(
            f"the assignment is to job {assignment.job} in namespace {options.namespace}, and its arguments "
            f"name job {assigned.job} in namespace {assigned.namespace}",
            "InvalidOption",
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
            "InvalidOption",
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
                "InvalidOption",
            )
        places[stage] = int(count)
    return places


def apptainer_options(options: argparse.Namespace) -> ApptainerOptions | None:
    """Return the options for Apptainer, or None if the sandboxes are of another kind.

    Raises:
        PipelineError: An option was given together with a kind of sandbox that it is not for.
    """
    if options.default_image and options.sandbox not in ("apptainer", *KINDS):
        raise PipelineError(
            f"--default-image goes with --sandbox apptainer, {' or '.join(KINDS)} (got --sandbox "
            f"{options.sandbox})",
            "InvalidOption",
        )
    apptainer_only = {
        "--image-cache": options.image_cache,
        "--apptainer": options.apptainer,
        "--fakeroot": options.fakeroot and options.sandbox not in KINDS,
        "--build-dockerfiles": options.build_dockerfiles,
    }
    if options.sandbox != "apptainer":
        for name, value in apptainer_only.items():
            if value:
                raise PipelineError(
                    f"{name} goes with --sandbox apptainer (got --sandbox {options.sandbox})", "InvalidOption"
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
            f"--allow-image: the cluster fetches the images of --sandbox {PROVIDER}", "InvalidOption"
        )
    return tuple(options.allow_images or (ANY,))


def tools_of(options: argparse.Namespace) -> Path | None:
    """Return the installer's folder with programs for sandboxes, or None.

    Raises:
        PipelineError: Sandboxes of this kind cannot have one.
    """
    tools: Path | None = options.sandbox_tools
    if tools is not None and options.sandbox in WITHOUT_TOOLS:
        raise PipelineError(
            f"--sandbox-tools: nothing can be mounted into the sandboxes of --sandbox {options.sandbox}",
            "InvalidOption",
        )
    return tools


def read_token(file: Path) -> str:
    """Return the token in `file`, which holds either the token alone or a tokens.json.

    Raises:
        PipelineError: The file cannot be read, or holds no token of a worker.
    """
    try:
        text = file.read_text().strip()
    except OSError as error:
        raise PipelineError(
            f"--token-file: {file} cannot be read: {error.strerror}", "InvalidOption"
        ) from error
    if not text.startswith("{"):
        return text
    try:
        token = json.loads(text)["worker"]
        if isinstance(token, list):
            token = token[0]  # This is the valid token that is not about to be retired.
    except (ValueError, LookupError) as error:
        raise PipelineError(
            f"--token-file: {file} holds no token of the role 'worker'", "InvalidOption"
        ) from error
    return str(token)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def argument_parser(*, ready: bool = False, exit_on_error: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a worker's command line.

    Args:
        ready: Whether the worker stands ready, so that its assignment brings what is required otherwise.
        exit_on_error: As in `argparse`.
    """
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
    parser.add_argument("--namespace", default="default", help="that of the jobs, default: %(default)s")
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
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=home / "run",
        help=f"folder of the sandboxes, default: run in ROLLYARD_HOME ({_DEFAULT_HOME})",
    )
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
        "--sandbox-tools",
        type=lambda text: Path(text).expanduser().resolve(),
        metavar="DIR",
        help=f"folder with programs, such as harnesses, that every sandbox sees read-only as {TOOLS}",
    )
    parser.add_argument(
        "--default-image",
        metavar="IMAGE",
        help="apptainer, docker, podman: the image of jobs that name none: docker://NAME; for apptainer also "
        "a SIF file, a root folder, …",
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
        help="apptainer: programs inside are root of their image and may change all of it; docker, podman: "
        "they may change what belongs to the image's root",
    )
    parser.add_argument(
        "--build-dockerfiles",
        action="store_true",
        help="apptainer: build the images of tasks' Dockerfiles; their commands run here as this user",
    )
    parser.add_argument(
        "--max-sandboxes", type=int, help="sandboxes at once on this node; default: by concurrency"
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
    parser.add_argument(
        "--node", help=f"default: the name of the host; of workers with --sandbox kubernetes: {NODE}"
    )
    parser.add_argument(
        "--name",
        default=f"{host}-{os.getpid()}-{secrets.token_hex(3)}",
        help="that of this worker, default: made from the host's name and the number of the process",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="how long stages may take to end after SIGTERM, default: %(default)g",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=20.0,
        help="seconds without a sign of life of a backend, after which its requests are given up, "
        "default: %(default)g",
    )
    parser.add_argument(
        "--backend-budget",
        type=float,
        default=60.0,
        help="seconds without any backend, after which a Run fails, default: %(default)g",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="default: %(default)s",
    )
    add_log_option(parser)
    add_trace_options(parser)
    return parser
