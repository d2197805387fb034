"""IPython behind jupyter_kernel_gateway: a real gateway process with one kernel and its websocket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import websocket
from rollyard_testing.vllm.servers import free_port

READY_SECONDS = 60.0
REPLY_SECONDS = 30.0


class GatewayError(RuntimeError):
    """The gateway did not start, or its kernel did not answer as the protocol says."""

    reason = "KernelGatewayFailed"


class KernelGateway:
    """A `python -m kernel_gateway` with one python3 kernel. It is used as a context manager.

    The messages are Jupyter's kernel protocol 5.3 as JSON over `/api/kernels/{id}/channels`.
    """

    def __init__(self) -> None:
        self.quick_ack = False
        """If true, each segment is acknowledged at once.

        The gateway writes many small messages with Nagle's algorithm on, so a usual client's delayed
        acknowledgement costs about 40 ms. Linux forgets the option, therefore it is set before every read.
        """
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="rollyard-bench-")
        self._session = uuid.uuid4().hex
        self._socket: websocket.WebSocket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KernelGateway:
        folder = Path(self._folder.name)
        log = folder / "gateway.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kernel_gateway",
                    "--KernelGatewayApp.ip=127.0.0.1",
                    f"--KernelGatewayApp.port={self._port}",
                    "--KernelGatewayApp.port_retries=0",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder / "ipython")},
                start_new_session=True,
            )
        try:
            self._wait(log)
            kernel = self._call("POST", "/api/kernels", {"name": "python3"})["id"]
            self._socket = websocket.create_connection(
                f"ws://127.0.0.1:{self._port}/api/kernels/{kernel}/channels?session_id={self._session}",
                timeout=REPLY_SECONDS,
            )
            self.execute("1+1")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                # The whole session is killed, because the kernel is a child that would outlive its gateway.
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(10)
        self._folder.cleanup()

    def execute(self, code: str) -> str:
        """Run `code` and return the text of its result, once the reply is there and the kernel is idle again.

        Raises:
            GatewayError: The kernel answered with an error, or not in time.
        """
        if self._socket is None:
            raise GatewayError("not connected")
        message_id = uuid.uuid4().hex
        header = {
            "msg_id": message_id,
            "username": "bench",
            "session": self._session,
            "msg_type": "execute_request",
            "version": "5.3",
        }
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
        request = {
            "header": header,
            "parent_header": {},
            "metadata": {},
            "content": content,
            "channel": "shell",
        }
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

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}"
        answer = httpx.request(method, url, json=body, timeout=REPLY_SECONDS, trust_env=False)
        return answer.raise_for_status().json()

    def _wait(self, log: Path) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                self._call("GET", "/api")
            except httpx.HTTPError:
                time.sleep(0.1)
            else:
                return
        tail = log.read_text(errors="replace")[-600:]
        raise GatewayError(f"no answer within {READY_SECONDS} s: {tail}")
