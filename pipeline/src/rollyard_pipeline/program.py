"""The program of a stage worker, which runs alone or in a process that stood ready for it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import uvloop
from rollyard_crds.base import build_all
from rollyard_crds.names import PROVIDER, StageName
from rollyard_crds.rolloutjob import StagesSpec
from rollyard_crds.workers import Assignment, AssignmentRequest
from rollyard_process.log_text import log_to
from rollyard_process.telemetry.export import SpanExport, exporting
from rollyard_process.telemetry.options import TraceOptions, trace_options
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.command_line import (
    apptainer_options,
    assigned_options,
    concurrency_of,
    images_of,
    parse,
    parse_known,
    read_token,
    stages_of,
)
from rollyard_pipeline.control_plane.calls import WorkerCalls, persistent
from rollyard_pipeline.control_plane.rest import RestControlPlane, import_late
from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.worker.worker import Worker, WorkerOptions

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
        "templates": options.sandbox_templates,
        "images": images_of(options),
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
            async with BackendClient(request_timeout=options.request_timeout) as backends:
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
    if options.job is None or not set(stages) - set(concurrency):
        spec = StagesSpec()
    else:
        spec = (await control.job_when_there(options.namespace, options.job)).stages
    return {stage: concurrency.get(stage, getattr(spec, stage).concurrency) for stage in stages}


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
        sandboxes_end=options.sandboxes_end,
        trouble_file=options.trouble_file,
        drain_seconds=options.drain_seconds,
        backend_budget=options.backend_budget,
        extensions=ready.extensions,
        formats=ready.formats,
        # No sandbox reaches the receiver of traces, which may have no password.
        egress=Egress([options.url, *([_traces(options).url] if _traces(options).on else ())]),
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
