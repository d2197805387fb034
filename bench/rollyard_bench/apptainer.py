"""Apptainer sandboxes: cold beside a bare instance, warm, and a command inside; as an ordinary user.

Root measures in the Slurm lab, whose user and Apptainer it borrows: this module is then a program there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_sandbox.client import ExecClient

from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline
from rollyard_bench.sandboxes import COMMAND_SECONDS, OWNER, REQUEST, bubblewrap, claimed
from rollyard_bench.servers import exec_server
from rollyard_bench.stats import Contestant, Sample, interleave

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 5
WARM = 2
REFILL_SECONDS = 1.0
"""Untimed pause in which the warm pool starts the next sandbox: a rollout's own work takes longer."""


class NotMeasured(RuntimeError):
    """What the figures need is not here; the text says what."""

    reason = "NotMeasured"


async def measure(settings: Settings) -> list[Measurement]:
    """All figures, here or in the lab."""
    if os.geteuid() != 0:
        return await _measured(settings)
    lab = str(ROOT / "scripts" / "slurm-lab")
    await _output(lab, "start")
    command = [lab, "run", "--chdir", str(ROOT / "bench"), "--", sys.executable]
    command += ["-m", "rollyard_bench.apptainer", *(["--quick"] if settings.quick else [])]
    entries = json.loads((await _output(*command)).splitlines()[-1])
    return [
        Measurement(
            entry["figure"],
            entry["value"],
            Baseline(**entry["baseline"]) if entry["baseline"] else None,
            entry["how"],
        )
        for entry in entries
    ]


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if process.returncode != 0:
        words = " | ".join(errors.decode(errors="replace").strip().splitlines()[-5:])
        raise NotMeasured(f"{' '.join(command[:3])} …: exit status {process.returncode}: {words}")
    return output.decode()


@asynccontextmanager
async def _provider(image: str) -> AsyncIterator[SandboxProvider]:
    """A started provider; leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        options = ApptainerOptions(default_image=image)
        provider = open_provider("apptainer", run_dir=Path(folder), node="bench", apptainer=options)
        await provider.start()
        try:
            yield provider
        finally:
            for left in provider.claimed():
                await provider.release(left)
            await provider.aclose()


async def _acquire(provider: SandboxProvider) -> float:
    """Milliseconds of one acquire; the sandbox is released after the clock has stopped."""
    begin = time.perf_counter()
    sandbox = await provider.acquire(REQUEST, OWNER)
    took = (time.perf_counter() - begin) * 1e3
    await sandbox.close()
    await provider.release(sandbox.handle)
    return took


async def _cold(program: str, image: str, samples: int) -> tuple[Sample, Sample, Sample]:
    """Cold acquires, bare instance starts, and exec server starts, in turns; ends are not timed."""
    cold: list[float] = []
    bare: list[float] = []
    server: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ryb-") as config:
        env = {**os.environ, "APPTAINER_CONFIGDIR": config}
        numbers = itertools.count()

        def call(*arguments: str) -> None:
            subprocess.run(
                [program, "-s", "instance", *arguments],
                env=env, cwd="/", check=True, stdin=subprocess.DEVNULL, timeout=60,
            )  # fmt: skip

        def start_bare() -> None:
            name = f"bare{next(numbers)}"
            begin = time.perf_counter()
            call("start", image, name)
            bare.append((time.perf_counter() - begin) * 1e3)
            call("stop", "-t", "1", name)

        async with _provider(image) as provider:

            async def acquire() -> None:
                cold.append(await _acquire(provider))

            async def serve() -> None:
                begin = time.perf_counter()
                async with exec_server("unix"):
                    server.append((time.perf_counter() - begin) * 1e3)

            contestants = {
                "bare": Contestant(start_bare, samples, warm_up=2),
                "server": Contestant(serve, samples, warm_up=2),
                "ours": Contestant(acquire, samples, warm_up=2),
            }
            await interleave(contestants, ROUNDS)
    return Sample(tuple(cold[2:])), Sample(tuple(bare[2:])), Sample(tuple(server[2:]))


async def _warm(image: str, samples: int) -> Sample:
    async with _provider(image) as provider:
        await provider.warm(REQUEST, WARM)
        taken: list[float] = []
        for _ in range(samples + WARM):
            await asyncio.sleep(REFILL_SECONDS)
            taken.append(await _acquire(provider))
        await provider.warm(REQUEST, 0)
    # The first ones may have met a pool that was still being filled.
    return Sample(tuple(taken[WARM:]))


async def _echo(image: str, samples: int) -> tuple[Sample, Sample | None]:
    """`echo hi` in an Apptainer sandbox, and in a bubblewrap sandbox where there is one, in turns."""

    async def step(client: ExecClient) -> None:
        result = await client.bash("echo hi", timeout=COMMAND_SECONDS)
        if result.exit_code != 0 or result.text().strip() != "hi":
            raise NotMeasured(f"`echo hi` gave {result.text()!r}, exit status {result.exit_code}")

    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(_provider(image))
        (ours,) = await stack.enter_async_context(claimed(provider))
        contestants = {"ours": Contestant(lambda: step(ours.client), samples)}
        if shutil.which("bwrap") is not None:
            other = await stack.enter_async_context(bubblewrap())
            (theirs,) = await stack.enter_async_context(claimed(other))
            contestants["bubblewrap"] = Contestant(lambda: step(theirs.client), samples)
        times = await interleave(contestants, ROUNDS)
    return times["ours"], times.get("bubblewrap")


async def _measured(settings: Settings) -> list[Measurement]:
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        raise NotMeasured("neither apptainer nor singularity is on the PATH")
    image = (await _output(str(ROOT / "scripts" / "sif"))).strip().splitlines()[-1]
    scale = 1 if settings.quick else 3
    cold, bare, server = await _cold(program, image, 10 * scale)
    warm = await _warm(image, 10 * scale)
    echo, other = await _echo(image, 300 * scale)
    beside = Baseline("the same in a bubblewrap sandbox", other.p50) if other is not None else None
    return [
        Measurement(
            "apptainer_cold",
            cold.p50,
            Baseline("apptainer instance start + exec server start, bare", bare.p50 + server.p50),
            f"acquire with an empty pool until the client is connected {cold.text()}; "
            f"`apptainer instance start` of the same SIF without options {bare.text()}; "
            f"exec server outside of a sandbox, until a client is connected {server.text()}",
        ),
        Measurement(
            "apptainer_warm",
            warm.p50,
            Baseline("cold start", cold.p50),
            f"acquire until the client is connected; warm {warm.text()}",
        ),
        Measurement("apptainer_echo_p50", echo.p50, beside, f"`echo hi` through the client {echo.text()}"),
    ]


def main() -> None:
    """Measures here, and prints the measurements as one line of JSON."""
    parse = argparse.ArgumentParser(prog="python -m rollyard_bench.apptainer")
    parse.add_argument("--quick", action="store_true")
    options = parse.parse_args()
    measured = asyncio.run(_measured(Settings(quick=options.quick)))
    print(json.dumps([asdict(one) for one in measured]))


if __name__ == "__main__":
    main()
