"""The listener of the ProRL calls: a port of its own in the process of the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvicorn

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.sockets import listening_socket, write_port
from rollyard_api.options.declared import ControlPlaneOptions
from rollyard_api.prorl.app import ProrlCalls
from rollyard_api.prorl.config import ProrlConfig, read_config
from rollyard_api.service import ControlPlane

FURTHER_CONNECTIONS: Final = 256
"""The number of connections in addition to those of waiting /process calls."""
SHUTDOWN_SECONDS: Final = 2


@dataclass(frozen=True, slots=True)
class ProrlListener:
    """A listening socket for the calls, with what the installer decided."""

    socket: socket.socket
    config: ProrlConfig
    host: str
    port_file: Path | None = None


class _Server(uvicorn.Server):
    """A second server, which leaves signals to the control plane's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def opened(options: ControlPlaneOptions) -> ProrlListener | None:
    """Return the listener of the ProRL calls, or None if they are off.

    Raises:
        OptionInvalid: A setting is wrong, or the address is not available.
    """
    if not options.prorl:
        if options.prorl_config is not None:
            raise OptionInvalid("--prorl-config goes with --prorl")
        return None
    config = read_config(options.prorl_config, options.prorl_tokenizer)
    sock = listening_socket(options.prorl_host, options.prorl_port, "--prorl-port")
    return ProrlListener(sock, config, options.prorl_host, options.prorl_port_file)


@asynccontextmanager
async def listening(plane: ControlPlane, listener: ProrlListener) -> AsyncIterator[None]:
    """Serve the calls within the block."""
    api = ProrlCalls(plane, listener.config)
    await api.forget_lost()
    config = uvicorn.Config(
        api.behind_gate(listener.host),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=listener.config.max_calls + FURTHER_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]), name="ProRL calls")
    if listener.port_file is not None:
        write_port(listener.port_file, listener.socket)
    try:
        yield
    finally:
        # The waiting calls are answered first, because the server waits for them.
        await api.ends.close()
        server.should_exit = True
        await serving
