"""The process of the control plane: from its options to its server, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from rollyard_process.log_text import log_to
from rollyard_process.open_files import open_many_files
from rollyard_process.telemetry.options import trace_options
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_api.app import build
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.sockets import cut_off_stalled, listening_socket, write_port
from rollyard_api.options.declared import ControlPlaneOptions
from rollyard_api.prorl import app as prorl_app
from rollyard_api.prorl.app import ProrlListener
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings

EXIT_USAGE: Final = 2
LARGE_BLOCK_BYTES: Final = 1 << 20
_M_MMAP_THRESHOLD: Final = -3
SHUTDOWN_SECONDS: Final = 2
"""The number of seconds that running requests have after a SIGTERM. Long polls are answered at once."""


class ControlPlaneServer(uvicorn.Server):
    """A uvicorn server that ends long polls on a signal, then exits with 0, and writes its port to a file."""

    def __init__(
        self, app: FastAPI, config: uvicorn.Config, port_file: Path | None, sock: socket.socket
    ) -> None:
        super().__init__(config)
        self._app = app
        self._port_file = port_file
        self._socket = sock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server, and write the port file once it listens."""
        await super().startup(sockets)
        if self.started and self._port_file is not None:
            await asyncio.to_thread(write_port, self._port_file, self._socket)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the server runs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        plane: ControlPlane | None = getattr(self._app.state, "plane", None)
        if plane is not None:
            plane.bus.close()


GARBAGE_THRESHOLD: Final = 10_000
"""The number of new objects after which the youngest are searched for cycles."""


def return_large_blocks() -> None:
    """Let the C library give large blocks of memory back to the system when they are freed.

    By default, it keeps tens of megabytes of them for each thread once the first has been freed. Rows of task
    files, for example, may be this large.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Only the GNU C library has this call.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def run(options: ControlPlaneOptions) -> int:
    """Run with these options until SIGTERM or SIGINT, and return the exit status."""
    try:
        log_to(level=options.log_level.upper(), form=options.log_format)
        sample = "" if options.trace_sample is None else f"{options.trace_sample:.10g}"
        traces = trace_options(options.otlp_endpoint, sample)
    except TraceOptionError as error:
        return _refused(error)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if (problem := tls_problem(options.tls_cert, options.tls_key)) is not None:
        return _refused(problem)
    settings = Settings(
        **{name: getattr(options, name) for name in ControlPlaneOptions.model_fields},
        traces=traces,
        traces_asked=bool(options.otlp_endpoint),
    )
    for options_of_list, name in (
        ("--allow-tasks-from, --allow-tasks-network", "task_sources"),
        ("--allow-rewards-from, --allow-rewards-network", "reward_services"),
    ):
        try:
            getattr(settings, name)
        except OptionInvalid as error:
            return _refused(f"{options_of_list}: {error}")
    try:
        sock = listening_socket(options.host, options.port, "--port")
        prorl = prorl_app.opened(options)
    except OptionInvalid as error:
        return _refused(error)
    for each in [sock] if prorl is None else [sock, prorl.socket]:
        if each.family != socket.AF_UNIX:
            cut_off_stalled(each, options.stall_seconds)
    open_many_files()  # Each long poll is a connection.
    return serve(settings, sock, prorl)


def _refused(problem: Exception | str) -> int:
    print(problem, file=sys.stderr)
    return EXIT_USAGE


def tls_problem(certificate: Path | None, key: Path | None) -> str | None:
    """Return why HTTPS cannot be served with these files, or None if it can or neither is given."""
    if certificate is None or key is None:
        alone = certificate is not None or key is not None
        return "--tls-cert and --tls-key belong together: give both or none" if alone else None
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            return f"{option} {path}: cannot be read: {error.strerror}"
    try:
        # With an empty password, a key that needs one is an error instead of a question on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        return f"--tls-cert {certificate}, --tls-key {key}: no PEM certificate and key of a pair: {error}"
    return None


def serve(settings: Settings, sock: socket.socket, prorl: ProrlListener | None) -> int:
    """Serve on a listening socket until a signal arrives, and return the exit status.

    Args:
        settings: The settings of the control plane.
        sock: The listening socket.
        prorl: The listener of the ProRL calls, or None if they are off.
    """
    app = build(settings, prorl=prorl)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        # The server's records use the same log as all others, because they are escaped there.
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        # Whoever connects could claim to be another client by such headers.
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=75,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    # The writer thread releases the interpreter at every SQLite call. At the default interval of 5 ms it
    # would wait that long for each return while requests are being parsed.
    sys.setswitchinterval(0.0005)
    return_large_blocks()
    # Requests make few cycles. Looking for them at the default threshold of 700 took a tenth of the time.
    gc.set_threshold(GARBAGE_THRESHOLD)
    server = ControlPlaneServer(app, config, settings.port_file, sock)
    # uvicorn itself exits if the start fails. The reason is printed below.
    with sock, contextlib.suppress(SystemExit):
        server.run(sockets=[sock])
    if server.started:
        return 0
    failure = getattr(app.state, "failure", None)
    print(f"the control plane cannot start: {failure}", file=sys.stderr)
    return EXIT_USAGE
