"""A server over HTTP whose answers about tokens are wrong in the way that a test chooses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

ABORT = "/inference/v1/abort_requests"
"""Asked with no ids by a probe, since vLLM has it exactly where it has `/inference/v1/generate`."""


class MisbehavingServer:
    """A real HTTP server that misbehaves as it is asked to: `mode` is how it answers requests for tokens.

    The modes are `ok`, `completions-only`, `sglang`, `garbage`, `no-logprobs`, `nan`, `two-tokens`, `empty`,
    `500`, `429`, `hang`, `cut` (which closes in the middle), `endless` and `wrong-model`.
    """

    def __init__(self) -> None:
        self.mode = "ok"
        self.health = 200
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.label: str | None = "default"
        self.metrics = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> MisbehavingServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def completions(self) -> int:
        """Return the number of requests for tokens so far."""
        return sum(body != {} and path != ABORT for path, body in self.asked)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        path = head.split(" ", 2)[1]
        length = next((int(h[16:]) for h in head.split("\r\n") if h.startswith("content-length: ")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        self.asked.append((path, body))
        answered = self._answer(path, bool(body) and path != ABORT)
        if answered is None:
            return await self._misbehave(writer)
        status, content = answered
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content)
        await writer.drain()
        return True

    def _answer(self, path: str, sampling: bool) -> tuple[int, bytes] | None:
        if not sampling:
            documents = {
                "/health": (self.health, b""),
                "/v1/models": (200, json.dumps(self.models).encode()),
                "/metrics": (200, self.metrics.encode()),
                "/weight_info": (200, json.dumps({"weight_version": self.label}).encode()),
            }
            if self.mode == "sglang":
                info = {"model_path": "/models/tiny", "weight_version": self.label}
                documents["/model_info"] = (200, json.dumps(info).encode())
                del documents["/weight_info"]
            if path in self._calls():  # The request only asks whether the call exists.
                return 400, b""
            if path == ABORT and "/inference/v1/generate" in self._calls():
                return 200, b""
            found = documents.get(path, (404, b""))
            return (404, b"") if path == "/weight_info" and self.label is None else found
        if self.mode in ("hang", "cut", "endless"):
            return None
        if self.mode.isdigit():
            return int(self.mode), b"no"
        return self._sampled(path)

    def _calls(self) -> tuple[str, ...]:
        """Return the calls for tokens that this server has."""
        if self.mode == "completions-only":
            return ("/v1/completions",)
        if self.mode == "sglang":
            return ("/v1/completions", "/generate")
        return ("/inference/v1/generate", "/v1/completions")

    def _sampled(self, path: str) -> tuple[int, bytes]:
        entry = {"token_id": 7, "logprob": -0.5}
        ended = {"finish_reason": "length", "prompt_token_ids": [1]}
        generate = {"token_ids": [7], "logprobs": {"content": [entry]}, **ended}
        plain = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, **ended}
        if self.mode == "garbage":
            return 200, b"<html>"
        if self.mode == "wrong-model":
            return 404, b"The model `tiny` does not exist."
        if self.mode == "completions-only":
            return (200, _choices(plain)) if path == "/v1/completions" else (404, b"")
        if self.mode == "sglang":
            without_ids = {"text": "x", "logprobs": None}
            meta: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1, "weight_version": self.label}
            meta |= {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 7, None]]}
            native = {"text": "x", "output_ids": [7], "meta_info": meta}
            known = {"/v1/completions": _choices(without_ids), "/generate": json.dumps(native).encode()}
            return (200, known[path]) if path in known else (404, b"")
        wrong: dict[str, Any] = {
            "no-logprobs": generate | {"logprobs": None},
            "too-few": generate | {"logprobs": {"content": []}},
            "nan": generate | {"logprobs": {"content": [entry | {"logprob": None}]}},
            "two-tokens": generate | {"token_ids": [7, 7], "logprobs": {"content": [entry, entry]}},
            "empty": generate | {"token_ids": [], "logprobs": {"content": []}},
        }
        return 200, _choices(wrong.get(self.mode, generate))

    async def _misbehave(self, writer: asyncio.StreamWriter) -> bool:
        if self.mode == "hang":
            await asyncio.sleep(60)
        elif self.mode == "cut":
            writer.write(b'HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n{"choices": [')
            await writer.drain()
        else:
            writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                await writer.drain()
        return False


def _choices(choice: dict[str, Any]) -> bytes:
    return json.dumps({"choices": [choice]}).encode()
