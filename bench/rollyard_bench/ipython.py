"""`1+1` in a sandbox's IPython, beside the same behind jupyter_kernel_gateway."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rollyard_testing.vllm.servers import free_port

from rollyard_bench.processes import answers, program
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.sandboxes import COMMAND_SECONDS, WrongOutput, bubblewrap, claimed
from rollyard_bench.stats import Contestant, Sample, interleave

if TYPE_CHECKING:
    import websocket

CODE = "1+1"
ROUNDS = 10
REPLY_SECONDS = 30.0


class GatewayError(RuntimeError):
    """The gateway's kernel did not answer as the protocol says."""

    reason = "KernelGatewayFailed"


class KernelGateway:
    """A connection to the kernel of a running gateway.

    The messages are Jupyter's kernel protocol 5.3 as JSON over `/api/kernels/{id}/channels`.
    """

    def __init__(self, connection: websocket.WebSocket, session: str) -> None:
        self.quick_ack = False
        """If true, each segment is acknowledged at once.

        The gateway writes many small messages with Nagle's algorithm on, so a usual client's delayed
        acknowledgement costs about 40 ms. Linux forgets the option, therefore it is set before every read.
        """
        self._socket = connection
        self._session = session

    def execute(self, code: str) -> str:
        """Run `code` and return the text of its result, once the reply is there and the kernel is idle again.

        Raises:
            GatewayError: The kernel answered with an error, or not in time.
        """
        message_id = uuid.uuid4().hex
        header = {"msg_id": message_id, "username": "bench", "session": self._session}
        header |= {"msg_type": "execute_request", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        request = {"header": header, "parent_header": {}, "metadata": {}}
        request |= {"content": content, "channel": "shell"}
        self._socket.send(json.dumps(request))
        result, replied, idle = "", False, False
        while not (replied and idle):
            if self.quick_ack and self._socket.sock is not None:
                self._socket.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            message = json.loads(self._socket.recv())
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            kind, body = message["header"]["msg_type"], message["content"]
            if kind == "execute_reply":
                replied = True
                if body["status"] != "ok":
                    raise GatewayError(f"{code!r}: {body.get('ename')}: {body.get('evalue')}")
            elif kind == "execute_result":
                result = body["data"]["text/plain"]
            elif kind == "status":
                idle = body["execution_state"] == "idle"
        return result


@asynccontextmanager
async def kernel_gateway() -> AsyncIterator[KernelGateway]:
    """Start `python -m kernel_gateway` with one python3 kernel, and yield a connection to it.

    Raises:
        ProgramFailed: The gateway does not answer.
        GatewayError: Its kernel does not.
        ImportError: There is no websocket client.
    """
    # This import is late, because without the gateway our own figure still stands.
    import websocket

    port, session = free_port(), uuid.uuid4().hex
    command = [sys.executable, "-m", "kernel_gateway", "--KernelGatewayApp.ip=127.0.0.1"]
    command += [f"--KernelGatewayApp.port={port}", "--KernelGatewayApp.port_retries=0"]
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as name:
        folder = Path(name)
        environment = {"JUPYTER_RUNTIME_DIR": name, "IPYTHONDIR": str(folder / "ipython")}
        async with program(command, folder / "gateway.log", environment) as running:
            await answers(running, "kernel_gateway", f"http://127.0.0.1:{port}/api")
            async with httpx.AsyncClient(trust_env=False, timeout=REPLY_SECONDS) as http:
                answer = await http.post(f"http://127.0.0.1:{port}/api/kernels", json={"name": "python3"})
            kernel = answer.raise_for_status().json()["id"]
            url = f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels?session_id={session}"
            with closing(websocket.create_connection(url, timeout=REPLY_SECONDS)) as connection:
                gateway = KernelGateway(connection, session)
                gateway.execute("1+1")
                yield gateway


async def _measure(settings: Settings, gateway: KernelGateway | None) -> dict[str, Sample]:
    samples = 100 if settings.quick else 300

    async with bubblewrap() as provider, claimed(provider) as sandbox:

        async def ours() -> None:
            result = await sandbox.client.ipython(CODE, timeout=COMMAND_SECONDS)
            if result.exit_code != 0 or result.result.strip() != "2":
                raise WrongOutput(f"{CODE}: exit code {result.exit_code}, {result!r}"[:400])

        def theirs(quick_ack: bool) -> None:
            if gateway is None:
                raise RuntimeError("no gateway")
            gateway.quick_ack = quick_ack
            if gateway.execute(CODE) != "2":
                raise WrongOutput(f"{CODE} behind the gateway was not 2")

        contestants = {"ours": Contestant(ours, samples, warm_up=10)}
        if gateway is not None:
            contestants["gateway"] = Contestant(lambda: theirs(True), samples, warm_up=10)
            contestants["usual client"] = Contestant(lambda: theirs(False), samples // 5, warm_up=2)
        return await interleave(contestants, ROUNDS)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the p50 of a cell. The gateway's client acknowledges at once, which favours the gateway."""
    try:
        async with kernel_gateway() as gateway:
            times = await _measure(settings, gateway)
    except (OSError, ImportError, httpx.HTTPError) as error:
        times = await _measure(settings, None)
        how = f"ours {times['ours'].text()}; no gateway baseline: {error}"
        return [Measurement("ipython_p50", times["ours"].p50, None, how)]
    how = (
        f"`{CODE}` in a bubblewrap sandbox {times['ours'].text()}; jupyter_kernel_gateway "
        f"outside of any sandbox, websocket client that acknowledges every segment at once "
        f"{times['gateway'].text()}; with a usual client {times['usual client'].text()}"
    )
    name = "jupyter_kernel_gateway, websocket"
    return [Measurement("ipython_p50", times["ours"].p50, Baseline(name, times["gateway"].p50), how)]
