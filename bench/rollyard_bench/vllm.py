"""Real vLLM servers for a measurement, from a cached environment, on one core each, of the tiny policy."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rollyard_testing.vllm.servers import EnvironmentMissing, VllmServer, vllm_python

from rollyard_bench.processes import ROOT, Missing, ProgramFailed

POLICY = ROOT / "examples" / "tiny-policy" / "hf"
LAST_WORDS_SECONDS = 10.0


def _model_folder(folder: Path, context: int) -> Path:
    """Make a copy of the tiny policy that takes `context` tokens.

    It was trained for 2,048. Beyond these its words mean nothing, but every token costs the same.
    """
    copy = folder / "model"
    shutil.copytree(POLICY, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = context
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@asynccontextmanager
async def vllm_servers(folder: Path, count: int, context: int = 2048) -> AsyncIterator[list[VllmServer]]:
    """Yield `count` servers that start side by side, each bound to a core of its own.

    Raises:
        Missing: There is no environment with vLLM, and none can be made.
        ProgramFailed: A server ended or was not ready in time.
    """
    try:
        python = await asyncio.to_thread(vllm_python)
    except EnvironmentMissing as error:
        reason = str(error).splitlines()[-1]
        raise Missing(f"no vLLM: scripts/vllm-env makes it, or VLLM_PYTHON names it; {reason}") from error
    model = _model_folder(folder, context)
    cores = sorted(os.sched_getaffinity(0))
    arguments = ("--max-model-len", str(context), "--max-num-batched-tokens", str(max(context, 4096)))
    servers = [
        VllmServer(python, model, cores[number % len(cores)], folder, arguments=arguments)
        for number in range(count)
    ]
    try:
        for server in servers:
            server.launch()
        await asyncio.gather(*(asyncio.to_thread(server.wait) for server in servers))
        yield servers
    except Exception as error:
        # A server that died is the cause, so it is reported instead of what its clients saw.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                while all(server.alive() for server in servers):  # noqa: ASYNC110 - a process ends
                    await asyncio.sleep(0.1)
        for server in servers:
            if not server.alive():
                raise ProgramFailed(f"vLLM ended: {server.words()[-900:]}") from error
        raise
    finally:
        for server in servers:
            await asyncio.to_thread(server.stop)
