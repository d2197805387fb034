"""IPython behind jupyter_kernel_gateway: a real gateway process with one kernel and its websocket."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import websocket
from rollyard_testing.vllm.servers import free_port

from rollyard_bench.processes import answers, program

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
    """
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
