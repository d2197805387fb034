"""Connecting to an exec server, and giving a sandbox what its rollout asked for."""

from __future__ import annotations

import asyncio

from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import ConnectionLost, FileError, SandboxSabotaged
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.sandboxes.errors import DiskFull, SandboxFileRefused, SandboxLost
from rollyard_pipeline.sandboxes.interface import SandboxRequest

_APPLY_SECONDS = 60.0


async def connect(
    address: str, seconds: float, token: str | None = None, secret: bytes | None = None
) -> ExecClient:
    """A connection to the exec server that listens on `address` and wants to be shown `token`.

    Where `secret` is given, or `token` is a `proven_token`, the server must prove that it knows it.

    Raises:
        SandboxLost: nobody listens there, or there is no answer within `seconds`.
        rollyard_sandbox.errors.SandboxSabotaged: somebody answers who does not know the secret, which only
            a program of the sandbox can have brought about.
    """
    try:
        async with asyncio.timeout(seconds):
            return await ExecClient.connect(address, token=token, secret=secret, timeout=seconds)
    except SandboxSabotaged:
        raise
    except (ExecError, OSError) as error:
        raise SandboxLost(f"the exec server at {address} does not answer: {error}") from error


async def apply(
    client: ExecClient, workdir: str, request: SandboxRequest, lease_seconds: float | None
) -> None:
    """Renews the lease, sets the request's variables for all later sessions and writes its files.

    `lease_seconds` is None where somebody else decides how long the sandbox lives.

    Raises:
        SandboxLost: the connection broke.
        DiskFull: the files exceed the sandbox's disk limit.
        SandboxFileRefused: a file cannot be written there.
    """
    path = ""
    try:
        async with asyncio.timeout(_APPLY_SECONDS):
            # The server answers in order: one round trip for both.
            calls = [client.set_env(dict(request.env))]
            if lease_seconds is not None:
                calls.append(client.renew(lease_seconds))
            await asyncio.gather(*calls)
            for path, text in request.files.items():
                await client.write_file(path if path.startswith("/") else f"{workdir}/{path}", text.encode())
    except FileError as error:
        if error.reason == "DiskFull":
            raise DiskFull(
                f"sandbox.files[{path!r}] does not fit: {error}; raise sandbox.resources.disk (or memory)"
            ) from error
        raise SandboxFileRefused(f"sandbox.files[{path!r}]: {error}") from error
    except (ConnectionLost, TimeoutError) as error:
        raise SandboxLost(f"the exec server is gone: {error}") from error
