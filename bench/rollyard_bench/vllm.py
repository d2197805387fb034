"""Real vLLM servers for a measurement, from a cached environment, on one core each, of the tiny policy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from rollyard.quickstart.vllm_servers import CPU_ENVIRONMENT
from rollyard_testing.vllm.servers import EnvironmentMissing, vllm_python

from rollyard_bench.processes import Missing, Program, ProgramFailed, program

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "examples" / "tiny-policy" / "hf"
MODEL = "tiny"
START_SECONDS = 200.0
LAST_WORDS_SECONDS = 10.0
BLOCK = 32
"""The tokens of one block of the prefix cache. The CPU build's own default, 128, is coarser."""

_COUNTER = re.compile(r"^vllm:(prefix_cache_queries_total|prefix_cache_hits_total)\{[^}]*\} (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """The prompt tokens that were looked up in the prefix cache, and those that were found there."""

    queried: float
    found: float

    def __sub__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(self.queried - other.queried, self.found - other.found)

    def __add__(self, other: CacheCounts) -> CacheCounts:
        return CacheCounts(self.queried + other.queried, self.found + other.found)

    @property
    def percent(self) -> float:
        """The share of the tokens that were found, in per cent."""
        return 100 * self.found / self.queried

    @property
    def computed(self) -> float:
        """Return the prompt tokens that the servers had to compute."""
        return self.queried - self.found


@dataclass(frozen=True, slots=True)
class Server:
    """One running server."""

    program: Program
    url: str
    model: Path
    """The folder that it serves, which holds the tokenizer, too."""

    async def cache_counts(self) -> CacheCounts:
        """Return the server's own counters since its start."""
        async with httpx.AsyncClient(timeout=30.0) as client:
            text = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        found = {match[1]: float(match[2]) for match in _COUNTER.finditer(text)}
        if len(found) != 2:
            raise ProgramFailed(f"{self.url}/metrics has no prefix-cache counters")
        return CacheCounts(found["prefix_cache_queries_total"], found["prefix_cache_hits_total"])

    async def empty_cache(self) -> None:
        """Forget every cached prefix."""
        async with httpx.AsyncClient(timeout=30.0) as client:
            (await client.post(f"{self.url}/reset_prefix_cache")).raise_for_status()


def model_folder(folder: Path, context: int) -> Path:
    """Make a copy of the tiny policy that takes `context` tokens.

    It was trained for 2,048. Beyond these its words mean nothing, but every token costs the same.
    """
    copy = folder / "model"
    shutil.copytree(POLICY, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = context
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _ready(running: Program, url: str) -> None:
    """Wait for a first answer: `/health` alone says only that the process lives."""
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2, "logprobs": 0}
    try:
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(timeout=60.0) as client:
            while True:
                running.check("vLLM")
                try:
                    if (await client.get(f"{url}/health")).status_code == 200:
                        (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.25)
    except TimeoutError as error:
        raise ProgramFailed(f"vLLM was not ready within {START_SECONDS:.0f} s: {running.tail()}") from error


def _command(python: str, model: Path, port: int, context: int) -> Sequence[str]:
    # The CPU build dies of a prompt that is read in parts while its request has a seed ("CPU Generator does
    # not use offset"), so prompts are read whole.
    return (
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK),
        "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, 4096)),
        "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
    )  # fmt: skip


@asynccontextmanager
async def vllm_servers(folder: Path, count: int, context: int = 2048) -> AsyncIterator[list[Server]]:
    """Yield `count` servers that start side by side, each bound to a core of its own.

    Raises:
        Missing: There is no environment with vLLM, and none can be made.
        ProgramFailed: A server ended or was not ready in time.
    """
    try:
        python = str(await asyncio.to_thread(vllm_python))
    except EnvironmentMissing as error:
        said = str(error).splitlines()[-1]
        raise Missing(f"no vLLM: scripts/vllm-env makes it, or VLLM_PYTHON names it; {said}") from error
    model = model_folder(folder, context)
    cores = sorted(os.sched_getaffinity(0))
    servers: list[Server] = []
    async with AsyncExitStack() as stack:
        for number in range(count):
            environment = {
                **CPU_ENVIRONMENT,
                "VLLM_CPU_OMP_THREADS_BIND": str(cores[number % len(cores)]),
                "VLLM_SERVER_DEV_MODE": "1",  # It enables the call that empties the prefix cache.
                "VLLM_NO_USAGE_STATS": "1",
            }
            port = _free_port()
            running = await stack.enter_async_context(
                program(_command(python, model, port, context), folder / f"vllm-{number}.log", environment)
            )
            servers.append(Server(running, f"http://127.0.0.1:{port}", model))
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(_ready(server.program, server.url))
        try:
            yield servers
        except Exception:
            # A server that died is the cause, so it is reported instead of what its clients saw.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    ends = [asyncio.create_task(server.program.process.wait()) for server in servers]
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for server in servers:
                server.program.check("vLLM")
            raise
