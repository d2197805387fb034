"""A worker whose job was deleted or replaced ends, instead of asking for leases for ever."""

from __future__ import annotations

import asyncio
import json

import pytest
from rollyard_crds.lease import FailRequest, StageFailure
from rollyard_pipeline.control_plane.rest import RestControlPlane
from rollyard_pipeline.errors import ControlPlaneRefused, JobEnded
from rollyard_pipeline.worker.worker import StagePool, WorkerOptions
from rollyard_testing.pace import patience


async def _refusing(reason: str) -> tuple[asyncio.Server, str]:
    """Start a control plane that answers every call with this refusal."""
    body = json.dumps(
        {"title": "Forbidden", "status": 403, "detail": "it is over", "reason": reason}
    ).encode()
    head = (
        "HTTP/1.1 403 Forbidden\r\nContent-Type: application/problem+json\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        length = int(request.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_pool_ends_with_the_job_of_its_token() -> None:
    server, url = await _refusing("JobEnded")
    async with server, RestControlPlane(url, "token") as control:
        options = WorkerOptions("w", "n", {"init": 1}, "job", "default")
        pool = StagePool(control, options, "init", lambda _lease: None)
        await asyncio.wait_for(pool.run(), patience(30))


@pytest.mark.parametrize(("reason", "kind"), [("JobEnded", JobEnded), ("Forbidden", ControlPlaneRefused)])
async def test_only_that_refusal_says_so(reason: str, kind: type[ControlPlaneRefused]) -> None:
    server, url = await _refusing(reason)
    failure = StageFailure(rollout="r", token=1, stage="init", reason="Broken")
    async with server, RestControlPlane(url, "token") as control:
        with pytest.raises(ControlPlaneRefused) as caught:
            await control.fail(FailRequest(worker="w", failures=[failure]))
    assert type(caught.value) is kind
