"""The server process, which loads the model, serves it, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import orjson
import uvicorn
import uvloop
from rollyard_process.telemetry.options import log_form

from rollyard_engine.errors import EngineError
from rollyard_engine.folder import ModelFolder, read_folder
from rollyard_engine.generation.model import load_model
from rollyard_engine.generation.scheduler import Scheduler, SchedulerLimits
from rollyard_engine.generation.sequence import Sequence
from rollyard_engine.generation.thread import EngineThread
from rollyard_engine.script import read_script
from rollyard_engine.serving.app import create_app
from rollyard_engine.serving.service import EngineService, ServerIdentity, now
from rollyard_engine.settings import EngineSettings
from rollyard_engine.tokens import load_tokenizer

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS: Final = 1.0
"""The seconds that the engine thread may take to end. Connections then have one more second to drain."""

SWITCH_INTERVAL_SECONDS: Final = 0.0005
"""The interpreter's switch interval in seconds. The runtime holds the interpreter lock during a step, and
this bounds how long the event loop waits for the lock."""

SMALLEST_DEFAULT_CONTEXT: Final = 256


def context_limit(folder: ModelFolder, settings: EngineSettings) -> int:
    """Return the length of the longest sequence to serve, in tokens.

    Raises:
        EngineError: The length exceeds the model's context, or one such sequence does not fit the cache
            memory.
    """
    fitting = settings.cache_bytes // folder.kv_bytes_per_token
    length = settings.max_model_len
    if length is None:
        length = min(folder.context_length, max(fitting, SMALLEST_DEFAULT_CONTEXT))
    if length > folder.context_length:
        raise EngineError(
            f"--max-model-len {length} is longer than the model's context of {folder.context_length} tokens",
            reason="StartupFailed",
        )
    if length > fitting:
        raise EngineError(
            f"one sequence of {length} tokens needs {length * folder.kv_bytes_per_token >> 20} MiB of KV "
            f"cache, --kv-cache-mib allows {settings.cache_bytes >> 20}: raise it or lower --max-model-len",
            reason="StartupFailed",
        )
    return length


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        EngineError: The address cannot be used. The message names it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", reason="StartupFailed"
        ) from error
    return listener


def run(settings: EngineSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        EngineError: The model folder cannot be served, or the server cannot start with these settings.
    """
    listener = listen(settings.host, settings.port)
    with contextlib.closing(listener):
        folder = read_folder(settings.model)
        max_model_len = context_limit(folder, settings)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            clean = runner.run(_serve(settings, listener, max_model_len))
    if not clean:
        # A model call is still running on the engine thread. Destroying the runtime while it runs would
        # crash.
        sys.stderr.flush()
        os._exit(0)


def build_service(
    settings: EngineSettings, max_model_len: int, notify: Callable[[list[Sequence]], None]
) -> EngineService:
    """Load the model and its tokenizer, without starting the engine thread.

    Raises:
        EngineError: The model or its tokenizer cannot be loaded.
    """
    model = load_model(settings.model, settings.threads)
    tokenizer = load_tokenizer(settings.model)
    script = None
    if settings.script is not None:
        end = tokenizer.eos_token_id
        if end is None:
            end = next(iter(model.folder.eos_token_ids), None)
        script = read_script(settings.script, tokenizer, model.folder.vocab_size, end)
    eos = {*model.folder.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    limits = SchedulerLimits(
        max_model_len, settings.max_num_seqs, settings.max_kept_seqs, settings.cache_bytes
    )
    scheduler = Scheduler(model, settings.policy_version, eos, limits)
    served = ServerIdentity(
        names=settings.served_names,
        root=settings.model,
        max_model_len=max_model_len,
        vocab_size=model.folder.vocab_size,
        threads=settings.threads,
        created=now(),
    )
    engine = EngineThread(scheduler, max_waiting=settings.max_waiting, notify=notify)
    return EngineService(served, tokenizer, engine, script)


async def _serve(settings: EngineSettings, listener: socket.socket, max_model_len: int) -> bool:
    """Serve until a signal stops the server, and return whether the engine thread ended in time."""
    loop = asyncio.get_running_loop()

    samples = SampleLog(settings.log_samples) if settings.log_samples is not None else None

    def notify(sequences: list[Sequence]) -> None:
        if samples is not None:
            samples.add(sequences)
        callbacks = [sequence.on_progress for sequence in sequences]
        with contextlib.suppress(RuntimeError):  # The loop has closed, so no client waits any more.
            loop.call_soon_threadsafe(_call_all, callbacks)

    service = build_service(settings, max_model_len, notify)
    config = uvicorn.Config(
        create_app(service),
        # Its records are handled like all others, which escapes what they quote of requests.
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    port = listener.getsockname()[1]
    stopping = asyncio.Event()

    class Server(uvicorn.Server):
        """The server of uvicorn, extended to announce when it serves and to leave signals to this module.

        uvicorn's own signal handling ends the process by raising the signal again, which would leave no exit
        status.
        """

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _announce(settings, port)

    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    service.engine.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener]))
        await stopping.wait()
        # Requests first end with the tokens they have, and their answers are sent while the connections
        # drain.
        ended = await asyncio.to_thread(service.engine.stop, SHUTDOWN_SECONDS)
        server.should_exit = True
    return ended


class SampleLog:
    """A file with one JSON line for each ended request: what was asked and what was sampled.

    Its fields are ``request_id``, ``prompt_ids``, ``ids``, ``logprobs``, ``versions`` (which weights sampled
    which ids, as spans), ``finish_reason`` and, for a request that failed, ``error``.

    Args:
        path: The file. Lines are appended to what it has.

    Raises:
        EngineError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise EngineError(
                f"--log-samples: {path} cannot be written: {error.strerror}", reason="StartupFailed"
            ) from error

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Append those of the sequences that have ended. It is called once with each of them."""
        lines = [
            orjson.dumps(
                {
                    "request_id": sequence.request_id,
                    "prompt_ids": sequence.prompt.tolist(),
                    "ids": [token.token_id for token in sequence.output],
                    "logprobs": [token.logprob for token in sequence.output],
                    "versions": sequence.version_spans(),
                    "finish_reason": sequence.finish_reason,
                    **({} if sequence.error is None else {"error": sequence.error.message}),
                },
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for sequence in dict.fromkeys(sequences)
            if sequence.finished
        ]
        if lines:
            self._file.write(b"".join(lines))


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def _announce(settings: EngineSettings, port: int) -> None:
    """Write the port file and a line on standard error.

    The file is written in one step, so readers see either nothing or the whole file.
    """
    if settings.port_file is not None:
        partial = settings.port_file.with_name(f".{settings.port_file.name}.{os.getpid()}")
        partial.write_text(f"{port}\n", encoding="ascii")
        partial.replace(settings.port_file)
    message = f"serving {settings.served_names[0]} on {settings.host} port {port}"
    if log_form(settings.log_format) == "json":
        log.setLevel(logging.INFO)
        log.info("%s", message)
        return
    sys.stderr.write(f"rollyard_engine: {message}\n")
    sys.stderr.flush()
