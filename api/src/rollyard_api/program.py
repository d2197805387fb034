"""The program of the control plane's process: its options, its server and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from rollyard_process.log_text import log_to
from rollyard_process.telemetry.options import add_log_option, add_trace_options, trace_options
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_api.app import build
from rollyard_api.browsers import config as browsers
from rollyard_api.browsers.config import BrowserOptionInvalid
from rollyard_api.core.sockets import NoSocket, cut_off_stalled, listening_socket, write_port
from rollyard_api.jobs.task_sources import ListEntryError
from rollyard_api.prorl import listener as prorl_listener
from rollyard_api.prorl.config import ProrlConfigError
from rollyard_api.prorl.listener import ProrlListener
from rollyard_api.service import ControlPlane
from rollyard_api.settings import BOUNDS, Settings, add_options

EXIT_USAGE = 2
LARGE_BLOCK_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
SHUTDOWN_SECONDS = 2
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


GARBAGE_THRESHOLD = 10_000
"""The number of new objects after which the young ones are searched for cycles."""
STALL_SECONDS = 60


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="rollyard_api", description="Rollyard's control plane.")
    made.add_argument("--state-dir", type=Path, required=True, help="tokens, database and trajectories")
    add_options(made)
    made.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain: serve HTTPS")
    made.add_argument("--tls-key", type=Path, metavar="FILE", help="its PEM private key, without a password")
    made.add_argument(
        "--host", default="127.0.0.1", help="address, or the absolute path of a Unix socket (--port 0)"
    )
    made.add_argument("--port", type=int, default=8765, help="0: any free port, see --port-file")
    made.add_argument("--port-file", type=Path, help="written with the port once requests are answered")
    made.add_argument(
        "--stall-seconds",
        type=int,
        default=STALL_SECONDS,
        help="a client that takes nothing of its answer for so long is cut off (default: %(default)s)",
    )
    made.add_argument(
        "--verify-python",
        default=os.environ.get("ROLLYARD_VERIFY_PYTHON", ""),
        metavar="PYTHON",
        help="an interpreter with torch and transformers, which verifies weight updates by a forward pass "
        "(default: ROLLYARD_VERIFY_PYTHON, else this one if it has them)",
    )
    add_trace_options(made)
    add_log_option(made)
    made.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    browsers.add_options(made)
    prorl_listener.add_options(made)
    return made


def open_many_files() -> None:
    """Raise the limit of open files to the permitted maximum, because each long poll is a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def return_large_blocks() -> None:
    """Let the C library give large blocks of memory back to the system when they are freed.

    By default, it keeps tens of megabytes of them for each thread once the first has been freed. Rows of task
    files, for example, may be this large.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Only the GNU C library has it.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT, and return the exit status."""
    given = parser().parse_args(argv)
    for name in (*BOUNDS, "lease_seconds", "no_backend_seconds", "stall_seconds"):
        if getattr(given, name) <= 0:
            parser().error(f"--{name.replace('_', '-')} must be more than 0")
    if (given.tls_cert is None) != (given.tls_key is None):
        parser().error("--tls-cert and --tls-key belong together: give both or none")
    try:
        log_to(level=given.log_level.upper(), form=given.log_format)
        traces = trace_options(given.otlp_endpoint, given.trace_sample)
    except TraceOptionError as error:
        parser().error(str(error))
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if given.tls_cert is not None and (problem := tls_problem(given.tls_cert, given.tls_key)) is not None:
        print(problem, file=sys.stderr)
        return EXIT_USAGE
    try:
        shown = browsers.parsed(given)
        sock = listening_socket(given.host, given.port, "--port")
        prorl = prorl_listener.opened(given)
    except (BrowserOptionInvalid, NoSocket, ProrlConfigError) as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    # An option with the name of a setting is that setting.
    named = {each.name: getattr(given, each.name) for each in fields(Settings) if hasattr(given, each.name)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in named.items()}
    settings = Settings(
        **values,
        traces=traces,
        traces_asked=bool(given.otlp_endpoint),
        browsers=shown,
    )
    for options_of_list, name in (
        ("--allow-tasks-from, --allow-tasks-network", "task_sources"),
        ("--allow-sandbox-host, --allow-eval-host", "sandbox_hosts"),
        ("--allow-rewards-from, --allow-rewards-network", "reward_services"),
    ):
        try:
            getattr(settings, name)
        except ListEntryError as error:
            print(f"{options_of_list}: {error}", file=sys.stderr)
            return EXIT_USAGE
    for each in [sock] if prorl is None else [sock, prorl.socket]:
        if each.family != socket.AF_UNIX:
            cut_off_stalled(each, given.stall_seconds)
    open_many_files()
    return serve(settings, sock, prorl, given)


def tls_problem(certificate: Path, key: Path) -> str | None:
    """Return why HTTPS cannot be served with this certificate and key, or None if it can."""
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


def serve(
    settings: Settings, sock: socket.socket, prorl: ProrlListener | None, given: argparse.Namespace
) -> int:
    """Serve on a listening socket until a signal arrives, and return the exit status.

    Args:
        settings: The settings of the control plane.
        sock: The listening socket.
        prorl: The listener of the ProRL calls, or None if they are off.
        given: The command line, for the port file, the level of the log, and the files of HTTPS.
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
        log_level=given.log_level,
        access_log=False,
        server_header=False,
        # Whoever connects could claim to be another client by such headers.
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=75,
        ssl_certfile=given.tls_cert,
        ssl_keyfile=given.tls_key,
    )
    # The writer thread releases the interpreter at every SQLite call. At the default interval of 5 ms it
    # would wait that long for each return while requests are being parsed.
    sys.setswitchinterval(0.0005)
    return_large_blocks()
    # Requests make few cycles. To look for them at the default threshold of 700 took a tenth of the time.
    gc.set_threshold(GARBAGE_THRESHOLD)
    server = ControlPlaneServer(app, config, given.port_file, sock)
    # uvicorn itself exits if the start fails. The reason is printed below.
    with sock, contextlib.suppress(SystemExit):
        server.run(sockets=[sock])
    if server.started:
        return 0
    failure = getattr(app.state, "failure", None)
    print(f"the control plane cannot start: {failure}", file=sys.stderr)
    return EXIT_USAGE
