"""vLLM servers: what starts one on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rollyard_crds.reading.engine_arguments import given_port
from rollyard_drivers.commands import DEFAULT_COMMAND, SERVER_ENV, vllm_command
from rollyard_drivers.host.installed_vllm import installed_version
from rollyard_drivers.reconcile.plan import Workload
from rollyard_drivers.reconcile.vllm_version import MINIMUM_TEXT, is_too_old

from rollyard.errors import CannotStart

API_SERVER: Final = "vllm.entrypoints.openai.api_server"
PORT_TRIES: Final = 100
LIST_SECONDS: Final = 20.0
_LISTED: Final = re.compile(r"^GPU (\d+): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """The command that starts a vLLM server, and the URL at which the server will answer."""

    program: str
    """The absolute path of the program."""
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """The environment variables in addition to those of the driver."""
    url: str


def find_program(name: str, env: Mapping[str, str]) -> str:
    """Return the absolute path of a program.

    Raises:
        CannotStart: There is no such program.
    """
    path = shutil.which(name, path=env.get("PATH", os.environ.get("PATH")))
    if path is None and name == DEFAULT_COMMAND[0]:
        raise CannotStart(
            "the command `vllm` is not on PATH: `pip install 'rollyard[vllm]'`, or name what starts vLLM's "
            "API server: a Python that has vLLM in --vllm-python of `rollyard up`, or a command in "
            "spec.engine.command"
        )
    if path is None:
        raise CannotStart(
            f"spec.engine.command: {name!r} is not a program that can be run here; `rollyard up` takes it "
            "from --vllm-python"
        )
    return os.path.abspath(path)


def free_port(host: str, taken: Collection[int]) -> int:
    """Return a port on which no program listens and that is not in `taken`.

    If another program takes the port first, the server fails and is started again on another one.

    Raises:
        OSError: The host is not an address of this machine, or no port is free.
    """
    for _ in range(PORT_TRIES):
        with socket.create_server((host, 0)) as probe:
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port
    raise OSError(f"no free port on {host} after {PORT_TRIES} tries")


def vllm_server(
    workload: Workload, host: str, port: int, gpus: Sequence[str], folder: str = ""
) -> VllmCommand:
    """Return the command that starts a workload's server. It does not repeat options that the user gave.

    Args:
        workload: The backend to start.
        host: The address to listen on.
        port: A free port. It is not used if the workload's arguments give `--port`.
        gpus: The GPUs that the server may use. If there are none, it is not restricted.
        folder: The folder of the model, if `workload.model` is its name on the hub.

    Raises:
        CannotStart: The program or the model folder does not exist, or the program's vLLM is too old.
    """
    env = dict(SERVER_ENV)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    env |= dict(workload.env)
    if workload.model.startswith(("/", ".", "~")) and not os.path.isdir(workload.model):
        raise CannotStart(f"spec.model: there is no folder {workload.model!r} on this machine")
    program, *arguments = vllm_command(workload, host, port, folder)
    url = f"http://{host}:{given_port(workload.args, port)}"
    path = find_program(program, env)
    version = installed_version(path)
    if is_too_old(version):
        raise CannotStart(
            f"{path} starts vLLM {version}, and Rollyard needs {MINIMUM_TEXT} or newer: update it, "
            "or name a newer one in spec.engine.command (`rollyard up`: --vllm-python)"
        )
    return VllmCommand(path, tuple(arguments), env, url)


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


def choose(count: int, index: int, visible: Sequence[str], taken: Iterable[str]) -> tuple[str, ...]:
    """Return `count` of the visible GPUs that are not taken.

    Args:
        count: The number of GPUs.
        index: The index of the backend, which the message of the exception names.
        visible: The GPUs of this machine.
        taken: The GPUs that other backends hold.

    Raises:
        CannotStart: Too few GPUs are free.
    """
    in_use = set(taken)
    free = [gpu for gpu in visible if gpu not in in_use]
    if len(free) < count:
        verb = "is" if len(free) == 1 else "are"
        plural = "" if count == 1 else "s"
        raise CannotStart(
            f"wants {count} GPU{plural} for backend {index}, {len(free)} {verb} free "
            f"(of {len(visible)}; spec.engine.resources.gpu, CUDA_VISIBLE_DEVICES)"
        )
    return tuple(free[:count])
