"""The GPUs of this machine, and the choice of free ones for a backend."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from rollyard.errors import CannotStart

LIST_SECONDS = 20.0
_LISTED = re.compile(r"^GPU (\d+): ", re.MULTILINE)


async def visible_gpus(env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names, or else those that `nvidia-smi -L` lists."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip() not in ("", "-1"))
    try:
        process = await asyncio.create_subprocess_exec(
            "nvidia-smi",
            "-L",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ()
    try:
        async with asyncio.timeout(LIST_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ()
    return tuple(_LISTED.findall(output.decode(errors="replace"))) if process.returncode == 0 else ()


def choose(wanted: int, index: int, visible: Sequence[str], taken: Iterable[str]) -> tuple[str, ...]:
    """Return `wanted` of the visible GPUs that are not taken.

    Args:
        wanted: The number of GPUs.
        index: The index of the backend, which the message of the exception names.
        visible: The GPUs of this machine.
        taken: The GPUs that other backends hold.

    Raises:
        CannotStart: Too few GPUs are free.
    """
    held = set(taken)
    free = [gpu for gpu in visible if gpu not in held]
    if len(free) < wanted:
        verb = "is" if len(free) == 1 else "are"
        plural = "" if wanted == 1 else "s"
        raise CannotStart(
            f"wants {wanted} GPU{plural} for backend {index}, {len(free)} {verb} free "
            f"(of {len(visible)}; spec.engine.resources.gpu, CUDA_VISIBLE_DEVICES)"
        )
    return tuple(free[:wanted])
