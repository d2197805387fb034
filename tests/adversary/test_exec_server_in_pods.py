"""A command of a pod answers on the exec server's port, and receives all that a worker sends there."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.claims import Claim, ClaimRequest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes.claims import ClaimProvider
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_sandbox import proof
from rollyard_sandbox.errors import SandboxSabotaged
from rollyard_sandbox.frames import encode
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="exec server", surface="connection in pods")


LIMIT_SECONDS = patience(20.0)


class OneClaim:
    """The calls of claims, with the one sandbox that exists."""

    def __init__(self, address: str, secret: str) -> None:
        self._address, self._secret = address, secret

    async def claim(self, request: ClaimRequest) -> Claim:
        return Claim(
            id="c1", namespace="default", job="j", job_uid="u", rollout=request.rollout,
            shape=request.shape, state="Bound", address=self._address, secret=self._secret,
        )  # fmt: skip

    async def claim_status(self, claim_id: str, wait: float) -> Claim:
        raise AssertionError("it is bound at once")

    async def release_claim(self, claim_id: str) -> None:
        raise AssertionError("nobody releases it")


class Pod:
    """An exec server as a pod starts it: on TCP, with the hash of its secret in its command line."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, secret: str, work: Path) -> None:
        self.process, self.address, self.secret, self.work = process, address, secret, work
        self.provider = ClaimProvider(OneClaim(address, secret), connect_seconds=LIMIT_SECONDS)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def acquire(self) -> Sandbox:
        """Acquire the sandbox as Init does: no command has run before."""
        return await self.provider.acquire(SandboxRequest(), LeaseRef(rollout="r-1", token=1))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Impostor:
    """A server that knows the hash of the secret and whatever it is sent, and agrees to everything."""

    def __init__(self, guess: str) -> None:
        self.guess = guess
        self.requests: list[dict[str, Any]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = struct.unpack("!II", await reader.readexactly(8))
                request = json.loads(await reader.readexactly(head))
                await reader.readexactly(body)
                self.requests.append(request)
                writer.write(encode(self._answer(request)))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        place = {"folder": "/f", "home": "/f/home", "tmp": "/f/tmp", "reward_file": "/f/reward"}
        fields: dict[str, Any] = {
            "id": request["id"], "version": 1, "pid": 1, "count": 0, **place,
        }  # fmt: skip
        purpose = "hello" if request["op"] == "hello" else "begin_eval /f"
        key = self._key(str(request.get("token")))
        if key is not None and "challenge" in request:
            fields["proof"] = proof.answer(key, purpose, request["challenge"])
        return fields

    def _key(self, token: str) -> bytes | None:
        """Return what a program of the policy could try as the key of the proof."""
        sent = token.encode()
        tried = {
            "what it was sent": sent[:64],  # A longer key is not possible.
            "what is derived from what it was sent": proof.derived(token)[1],
            "the hash of what it was sent": hashlib.sha256(sent).digest(),
            "its own": b"k" * 32,
        }
        return tried.get(self.guess)


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    work = tmp_path / "work"
    work.mkdir()
    secret = secrets.token_hex(16)
    ready, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "rollyard_sandbox.server", "--workdir", str(work),
        "--listen", "tcp://127.0.0.1:0", "--token-sha256", hashlib.sha256(secret.encode()).hexdigest(),
        "--ready-fd", str(write), pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    with os.fdopen(ready) as file:
        line = await asyncio.to_thread(file.readline)
    made = Pod(process, json.loads(line)["listen"][0], secret, work)
    yield made
    await made.end()


A_PROGRAM_ON_THE_PORT = pytest.mark.attack(
    "a program on the server's port that agrees to everything, and that knows the hash of the secret and "
    "all that workers send there",
    stopped_by="the server learns the secret before any command runs; workers never send it again, and "
    "demand a proof",
)


@A_PROGRAM_ON_THE_PORT
@pytest.mark.parametrize(
    "guess",
    [
        "what it was sent", "what is derived from what it was sent", "the hash of what it was sent",
        "its own", "nothing",
    ],
)  # fmt: skip
async def test_a_program_on_the_port_of_a_pod_is_found_out(pod: Pod, guess: str) -> None:
    """A program that takes the port learns nothing with which it passes for the server, even without
    protections.
    """
    async with await pod.acquire() as sandbox:
        handle = sandbox.handle
        await sandbox.client.begin_eval()
    async with await pod.provider.attach(handle) as again:
        await again.client.begin_eval()
    await pod.end()
    impostor = Impostor(guess)
    fake = await asyncio.start_server(impostor.serve, "127.0.0.1", pod.port)
    try:
        for _ in range(2):
            with pytest.raises(SandboxSabotaged, match="does not know its secret"):
                await pod.provider.attach(handle)
    finally:
        fake.close()
    assert [request["op"] for request in impostor.requests] == ["hello", "hello"], "no evaluation began"
    assert pod.secret not in json.dumps(impostor.requests), "the secret itself is never sent again"


@A_PROGRAM_ON_THE_PORT
async def test_an_evaluation_on_a_connection_that_was_taken_is_found_out(pod: Pod) -> None:
    async with await pod.acquire() as sandbox:
        handle = sandbox.handle
    await pod.end()
    fake = await asyncio.start_server(Impostor("nothing").serve, "127.0.0.1", pod.port)
    try:
        async with await pod.provider.attach(
            handle.model_copy(update={"token": proof.derived("x")[0]})
        ) as it:
            # The server behaves as if it had proven itself, and were another one now.
            it.client.secret = proof.derived(pod.secret)[1]
            with pytest.raises(SandboxSabotaged, match="does not know its secret"):
                await it.client.begin_eval()
    finally:
        fake.close()


@pytest.mark.attack(
    "read the secret in command lines and environments",
    stopped_by="the command line holds its SHA-256, and the server is not dumpable",
)
async def test_the_secret_of_a_pod_is_out_of_reach(pod: Pod) -> None:
    """Commands read the secret's hash in the command line, but neither the secret nor what is made of it."""
    async with await pod.acquire() as sandbox:
        script = f"cat /proc/{pod.process.pid}/cmdline /proc/[0-9]*/environ | tr '\\0' '\\n'; env; set"
        shown = (
            await sandbox.client.bash(f"{{ {script}; }} 2>&1", timeout=patience(20), max_output=1 << 22)
        ).text()
    token, key = proof.derived(pod.secret)
    assert hashlib.sha256(pod.secret.encode()).hexdigest() in shown
    assert [one for one in (pod.secret, token, key.hex()) if one in shown] == []


@pytest.mark.attack(
    "a pod that has ended, and whose address another one has, is taken for sabotage",
    stopped_by="a refused token is an infrastructure failure",
)
async def test_another_pod_at_the_address_is_no_sabotage(pod: Pod) -> None:
    """The cluster gives the address of a pod that has ended to another one, and the rollout begins again."""
    async with await pod.acquire() as sandbox:
        handle = sandbox.handle
    other = handle.model_copy(update={"token": proof.PROVEN + "0" * 32})
    with pytest.raises(SandboxLost):
        await pod.provider.attach(other)
