"""A slurmrestd over a Slurm in memory: what is sent to it, and how it breaks."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

INVALID_JOB = {"error": "Invalid job id specified", "error_number": 2017, "source": "slurm_load_job"}


@dataclass
class Restd:
    """A server that listens while its block lasts.

    Args:
        `version` is that of the API; from 39 on it has the typed shape.
    """

    socket: Path
    version: int = 38
    flags: bool = False
    """Whether its DELETE takes flags."""
    token: str = ""
    broken: str = ""
    """With `hang` it answers nothing; with `cut` it closes after it has read; with `away` the controller is
    away; with `proxy` what stands before it answers.
    """
    jobs: dict[int, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    refuse: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    clock: int | None = None

    async def __aenter__(self) -> Restd:
        self._server = await asyncio.start_unix_server(self._serve, self.socket)
        return self

    async def __aexit__(self, *about: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            line, *rest = head.split("\r\n")
            headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in rest)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = line.split(" ")
            if self.broken == "hang":
                await asyncio.sleep(60)
            self.calls.append((method, path, json.loads(body) if body else None))
            if self.broken == "cut":
                return
            status, answer = self._answer(method, path, headers)
            content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"
            writer.write(f"{first}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        if self.broken == "proxy":
            return 502, "<html>Bad Gateway</html>"
        if self.token and headers.get("x-slurm-user-token") != self.token:
            return 401, "Authentication failure"
        if path == "/openapi/v3":
            names = ["signal", *(["flags"] if self.flags else [])]
            parameters = [{"name": name, "in": "query"} for name in names]
            base = f"/slurm/v0.0.{self.version}"
            return 200, {
                "paths": {
                    f"{base}/job/submit": {"post": {}},
                    "/slurm/v0.0.7/job/submit": {"post": {}},
                    f"{base}/job/{{job_id}}": {"delete": {"parameters": parameters}},
                }
            }
        if not path.startswith(f"/slurm/v0.0.{self.version}/"):
            return 404, "Unable find requested URL. Please view /openapi/v3 for API reference."
        if self.broken == "away":
            return 500, {
                "errors": [
                    {"error_code": 1800, "error": "Unable to contact slurm controller (connect failure)"}
                ]
            }
        return self._slurm(method, path.removeprefix(f"/slurm/v0.0.{self.version}"))

    def _slurm(self, method: str, path: str) -> tuple[int, Any]:
        if path == "/diag":
            return 200, {"errors": [], "statistics": {"req_time": self.clock}}
        if path == "/job/submit":
            if self.refuse:
                return 500, {"errors": [{"error_code": 2000, "error": self.refuse}]}
            return 200, {"errors": [], "job_id": 42, "step_id": "BATCH"}
        if path == "/jobs":
            return 200, {"errors": [], "jobs": list(self.jobs.values())}
        if path.startswith("/node/"):
            return 200, {"errors": [], "nodes": [self.nodes[path.removeprefix("/node/")]]}
        match = re.match(r"/job/(\d+)", path)
        assert match is not None, path
        if int(match[1]) not in self.jobs:
            return 500, {"errors": [INVALID_JOB], "jobs": []}
        return 200, {"errors": [], "jobs": [self.jobs[int(match[1])]]}
