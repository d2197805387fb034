"""`python -m rollyard_pipeline`: a stage worker.

What is imported here is what starts a sandbox; the rest, which takes longer than that, is imported beside
the start of the first one (`rollyard_pipeline.late`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard_crds.names import NODE, PROVIDER, STAGES, StageName
from rollyard_crds.security.log_text import log_to

from rollyard_pipeline.ahead import first_sandbox, keep_warm, request_of, stages_of
from rollyard_pipeline.errors import ControlPlaneError, OptionError, PipelineError
from rollyard_pipeline.sandboxes import PROVIDERS, open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest

if TYPE_CHECKING:
    from rollyard_crds.rolloutjob import RolloutJobSpec

    from rollyard_pipeline.control_plane.rest import RestControlPlane
    from rollyard_pipeline.registry import Registry
    from rollyard_pipeline.worker.worker import Worker

_DEFAULT_HOME: Final = "~/.local/state/rollyard"
_SWITCH_SECONDS: Final = 0.0005
NODE_UNUSABLE: Final = 73
"""Exit status (EX_CANTCREAT of sysexits.h): this node lacks what sandboxes need; another one may have it."""


def main(argv: list[str] | None = None) -> int:
    """Run a worker; 0 when drained or when its job is over, 2 for unusable options, 73 for a node."""
    # They are for applications that watch their own models; to look for them reads a file of each package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    options = _parser().parse_args(argv)
    if options.node is None:
        options.node = NODE if options.sandbox == PROVIDER else socket.gethostname()
    log_to(level=options.log_level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=_loop) as runner:
            return runner.run(_run(options))
    except PipelineError as error:
        print(f"rollyard worker: {error.reason}: {error}", file=sys.stderr)
        return NODE_UNUSABLE if error.of_node else 2


async def _run(options: argparse.Namespace) -> int:
    stages = _stages(options.stages)
    given = _concurrency(options.concurrency)
    with _Signals() as signals:
        return await _serve(options, stages, given, signals)


async def _serve(
    options: argparse.Namespace, stages: list[StageName], given: dict[StageName, int], signals: _Signals
) -> int:
    token = _token(options.token_file)
    first = first_sandbox(options.first_sandbox) if "init" in stages and options.first_sandbox else None
    # The interpreter has one lock: what leads to the start of the first sandbox comes before the imports.
    begun = asyncio.Event()
    if first is None or options.sandbox == PROVIDER:
        begun.set()
    async with contextlib.AsyncExitStack() as stack:
        connecting = asyncio.create_task(_connected(options.url, token, stack, begun))
        stack.push_async_callback(_abandoned, connecting)
        provider = open_provider(
            options.sandbox,
            run_dir=options.run_dir,
            node=options.node,
            claims=(await connecting)[0] if options.sandbox == PROVIDER else None,
            apptainer=_apptainer(options),
        )
        await provider.start()
        stack.push_async_callback(provider.aclose)
        # Only one, that it has the machine's cores for itself; the others follow the first lease.
        await keep_warm(provider, first, 1)
        begun.set()
        control, extensions = await connecting
        required = bool(set(stages) - set(given))
        job = None
        if first is None or required:
            job, wanted = await _job(control, options, extensions, required=required)
            if "init" in stages and first is None:
                first = wanted
                await keep_warm(provider, first, 1)
        spec = stages_of(job)
        places = {stage: given.get(stage, getattr(spec, stage).concurrency) for stage in stages}
        await _work(options, control, provider, extensions, places, first, signals)
    return 0


async def _connected(
    url: str, token: str, stack: contextlib.AsyncExitStack, begun: asyncio.Event
) -> tuple[RestControlPlane, Registry]:
    """A client of the control plane, once all that a worker consists of is imported, from `begun` on."""
    await begun.wait()
    interval = sys.getswitchinterval()
    # Imports keep the interpreter's lock: the start of a sandbox beside them is not to wait for it so long.
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        await in_thread(import_module, "rollyard_pipeline.late")
    finally:
        sys.setswitchinterval(interval)
    from rollyard_pipeline import late

    return await stack.enter_async_context(late.RestControlPlane(url, token)), late.Registry()


async def _job(
    control: RestControlPlane, options: argparse.Namespace, extensions: Registry, *, required: bool
) -> tuple[RolloutJobSpec | None, SandboxRequest | None]:
    """The worker's own job and its rollouts' sandbox, where it has them.

    Raises:
        ControlPlaneError: the job is gone, and `required`.
    """
    if options.job is None:
        return None, None
    try:
        job = await control.job_when_there(options.namespace, options.job)
    except ControlPlaneError:
        if required:
            raise
        return None, None  # the first lease tells that it is over
    return job, await asyncio.to_thread(request_of, job, extensions)


async def _abandoned(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _work(
    options: argparse.Namespace,
    control: RestControlPlane,
    provider: SandboxProvider,
    extensions: Registry,
    places: dict[StageName, int],
    begun: SandboxRequest | None,
    signals: _Signals,
) -> None:
    from rollyard_pipeline.late import BackendClient, Worker, WorkerOptions

    async with BackendClient(request_timeout=options.request_timeout) as client:
        await signals.run(
            Worker(
                control,
                client,
                provider,
                WorkerOptions(
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
                    extensions=extensions,
                    begun=begun,
                ),
            )
        )


class _Signals:
    """SIGTERM and SIGINT: the first drains the worker, the second stops it at once.

    They are caught from before the first sandbox until after the last: an uncaught one in
    the middle of the clean-up would leave sandboxes behind.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = 0
        self._worker: Worker | None = None
        self._running: asyncio.Future[None] | None = None

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        return self

    def __exit__(self, *exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
            if exc[0] is None:
                # All is done: who asks for the end now, as this process ends, must not make it a failure.
                signal.signal(number, signal.SIG_IGN)

    async def run(self, worker: Worker) -> None:
        """Run the worker to its end."""
        self._worker = worker
        self._running = asyncio.ensure_future(worker.run())
        if self._asked:
            worker.drain()
        try:
            await self._running
        except asyncio.CancelledError:
            if self._asked < 2:
                raise

    def _stop(self) -> None:
        self._asked += 1
        if self._asked == 1 and self._worker is not None:
            self._worker.drain()
        elif self._asked > 1 and self._running is not None:
            self._running.cancel()


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _stages(text: str) -> list[StageName]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(wanted) - set(STAGES))
    if unknown or not wanted:
        raise OptionError(
            f"--stages: {', '.join(unknown) or 'nothing'} given; expected some of {', '.join(STAGES)}"
        )
    return [stage for stage in STAGES if stage in wanted]


def _concurrency(text: str | None) -> dict[StageName, int]:
    places: dict[StageName, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, count = part.partition("=")
        stage = next((stage for stage in STAGES if stage == name.strip()), None)
        if stage is None or not count.strip().isdigit() or not 1 <= int(count) <= 4096:
            raise OptionError(
                f"--concurrency: '{part}'; expected for example init=16,run=64,eval=16 (1 to 4096)"
            )
        places[stage] = int(count)
    return places


def _apptainer(options: argparse.Namespace) -> ApptainerOptions | None:
    given = {
        "--default-image": options.default_image,
        "--image-cache": options.image_cache,
        "--apptainer": options.apptainer,
        "--fakeroot": options.fakeroot,
    }
    if options.sandbox != "apptainer":
        for name, value in given.items():
            if value:
                raise OptionError(f"{name} goes with --sandbox apptainer (got --sandbox {options.sandbox})")
        return None
    return ApptainerOptions(
        program=options.apptainer,
        default_image=options.default_image,
        image_cache=options.image_cache,
        image_cache_bytes=options.image_cache_gib << 30,
        fakeroot=options.fakeroot,
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _token(file: Path) -> str:
    try:
        text = file.read_text().strip()
    except OSError as error:
        raise OptionError(f"--token-file: {file} cannot be read: {error.strerror}") from error
    if not text.startswith("{"):
        return text
    try:
        token = json.loads(text)["worker"]
        if isinstance(token, list):
            token = token[0]  # of those that are valid, the one that is not on its way out
    except (ValueError, LookupError) as error:
        raise OptionError(f"--token-file: {file} holds no token of the role 'worker'") from error
    return str(token)


def _parser() -> argparse.ArgumentParser:
    home = Path(os.environ.get("ROLLYARD_HOME") or _DEFAULT_HOME).expanduser()
    host = socket.gethostname()
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_pipeline", description="A Rollyard stage worker."
    )
    parser.add_argument("--url", required=True, help="the control plane, http://HOST:PORT")
    parser.add_argument(
        "--token-file", required=True, type=Path, help="tokens.json, or a file with just the token"
    )
    parser.add_argument("--job", help="work for this job only, and exit when it is over")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--stages", default=",".join(STAGES), help="pools to run, default: %(default)s")
    parser.add_argument(
        "--concurrency", help="places per stage, as init=16,run=64,eval=16; default: the job's"
    )
    parser.add_argument("--run-dir", type=Path, default=home / "run", help="default: %(default)s")
    parser.add_argument(
        "--sandbox", choices=PROVIDERS, default="bubblewrap",
        help="kubernetes: pods that the operator starts; with it --node is kubernetes too",
    )  # fmt: skip
    parser.add_argument(
        "--default-image", metavar="IMAGE",
        help="apptainer: the image of jobs that name none: a SIF file, a root folder, docker://NAME, …",
    )  # fmt: skip
    parser.add_argument(
        "--image-cache", type=Path, metavar="DIR",
        help="apptainer: where images built from others are kept, best on storage that the nodes share; "
        "default: in the run dir",
    )  # fmt: skip
    parser.add_argument(
        "--image-cache-gib", type=_positive, default=100, metavar="N",
        help="apptainer: beyond it the images that were not used for longest go, default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--apptainer", metavar="PROGRAM", help="default: apptainer, else singularity, from PATH"
    )
    parser.add_argument(
        "--fakeroot", action="store_true",
        help="apptainer: programs inside are root of their image and may change all of it",
    )  # fmt: skip
    parser.add_argument(
        "--max-sandboxes", type=int, help="claimed at once on this node; default: by concurrency"
    )
    parser.add_argument(
        "--sandboxes-end", action="store_true",
        help="sandboxes end with the worker that started them, as in a batch job",
    )  # fmt: skip
    parser.add_argument(
        "--trouble-file", type=Path, metavar="FILE",
        help="says why this worker takes no Init work; gone while nothing is wrong",
    )  # fmt: skip
    parser.add_argument(
        "--first-sandbox", metavar="JSON",
        help="what its job's rollouts will want, begun before the job is asked for; from the driver",
    )  # fmt: skip
    parser.add_argument("--node", help=f"default: {host}; of workers with --sandbox kubernetes: {NODE}")
    parser.add_argument("--name", default=f"{host}-{os.getpid()}-{secrets.token_hex(3)}")
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument(
        "--request-timeout", type=float, default=300.0, help="seconds for one backend request"
    )
    parser.add_argument("--backend-budget", type=float, default=60.0, help="seconds without any backend")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


if __name__ == "__main__":
    sys.exit(main())
