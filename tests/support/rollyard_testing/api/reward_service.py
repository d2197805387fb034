"""A reward service on loopback that answers as the path of a request says, well or badly."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

SECRET = "hunter2-is-the-secret"
"""A text in bad answers that no author of a job may get to see."""
ANSWERS: dict[str, bytes] = {
    "score": b'{"reward": 0.5, "components": {"style": 0.25}}',
    "whole": b'{"reward": 1}',
    "nan": b'{"reward": NaN}',
    "huge": b'{"reward": 1000000000}',
    "infinite": b'{"reward": 1e999}',
    "bool": b'{"reward": true}',
    "text": f'{{"reward": "{SECRET}"}}'.encode(),
    "none": b'{"score": 1.0}',
    "list": b"[1.0]",
    "garbage": f"<html>{SECRET}</html>".encode(),
    "component": f'{{"reward": 1.0, "components": {{"style": "{SECRET}"}}}}'.encode(),
    "many": json.dumps({"reward": 1.0, "components": {f"c{n}": 1.0 for n in range(65)}}).encode(),
    "deep": b'{"reward": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "large": b'{"reward": 1.0, "padding": "' + b"x" * (1 << 20) + b'"}',
}


class ScriptedRewardService:
    """Serves until it is closed, and keeps the episodes that it was sent."""

    def __init__(self) -> None:
        self.episodes: list[Any] = []
        self.paths: list[str] = []
        self.open = 0
        self.most_open = 0
        self.hangs = asyncio.Event()
        self.released = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.released.set()
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        """The URL that ends with a slash, to which the name of an answer is added."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        path, _, query = head.split(" ", 2)[1].partition("?")
        self.paths.append(path)
        self.episodes.append(json.loads(await reader.readexactly(length)))
        kind, status, extra = path.strip("/"), "200 OK", ""
        if kind == "hang":
            self.hangs.set()
            await self.released.wait()
        elif kind == "wait":
            # Further requests have time to arrive, if they are let through.
            await asyncio.sleep(0.05)
            kind = "score"
        elif kind == "drip":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not self.released.is_set():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)
            return
        elif kind == "break":
            return
        elif kind == "redirect":
            status, extra = "307 Temporary Redirect", f"Location: {query}\r\n"
        elif kind.isdigit():
            status = f"{kind} {SECRET}"
        body = ANSWERS.get(kind, SECRET.encode())
        writer.write(f"HTTP/1.1 {status}\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
