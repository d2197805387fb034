"""Connecting to an exec server, and applying a rollout's request to its sandbox."""

from __future__ import annotations

import asyncio
from typing import Final

from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import ConnectionLost, FileError, SandboxSabotaged
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.sandboxes.errors import DiskFull, SandboxImpossible, SandboxLost
from rollyard_pipeline.sandboxes.interface import SandboxRequest

_APPLY_SECONDS: Final = 60.0


async def connect(
    address: str,
    seconds: float,
    token: str | None = None,
    secret: bytes | None = None,
    lease: float | None = None,
) -> ExecClient:
    """Return a connection to the exec server at `address`, which expects `token`.

    With `lease` the sandbox's lease is renewed for that many seconds. If `secret` is given, or `token` is a
    `proven_token`, the server must prove that it knows the secret.

    Raises:
        SandboxLost: No server listens there, or it does not answer within `seconds`.
        rollyard_sandbox.errors.SandboxSabotaged: The peer does not know the secret, which only a program of
            the sandbox can have caused.
    """
    try:
        return await ExecClient.connect(address, token=token, secret=secret, lease=lease, timeout=seconds)
    except SandboxSabotaged:
        raise
    except (ExecError, OSError) as error:
        raise SandboxLost(f"the exec server at {address} does not answer: {error}") from error


async def apply(
    client: ExecClient, workdir: str, request: SandboxRequest, lease_seconds: float | None
) -> None:
    """Renew the lease, set the request's variables for all later sessions and write its files.

    `lease_seconds` is None if the lease has just been renewed, or another component decides how long the
    sandbox lives.

    Raises:
        SandboxLost: The connection broke.
        DiskFull: The files exceed the sandbox's disk limit.
        SandboxImpossible: A file cannot be written at its path.
    """
    path = ""
    try:
        async with asyncio.timeout(_APPLY_SECONDS):
            if request.env:
                await client.set_env(dict(request.env))
            if lease_seconds is not None:
                await client.renew(lease_seconds)
            for path, text in request.files.items():
                await client.write_file(path if path.startswith("/") else f"{workdir}/{path}", text.encode())
    except FileError as error:
        if error.reason == "DiskFull":
            raise DiskFull(
                f"sandbox.files[{path!r}] does not fit: {error}; raise sandbox.resources.disk (or memory)"
            ) from error
        raise SandboxImpossible(f"sandbox.files[{path!r}]: {error}", "SandboxFileRefused") from error
    except (ConnectionLost, TimeoutError) as error:
        raise SandboxLost(f"the exec server is gone: {error}") from error
