"""The command line and environment of one vLLM server, and where its program is."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollyard_drivers.commands.arguments import given_port
from rollyard_drivers.commands.vllm import DEFAULT_COMMAND, SERVER_ENV, vllm_command
from rollyard_drivers.reconcile.plan import Workload

from rollyard.errors import CannotStart

API_SERVER = "vllm.entrypoints.openai.api_server"
PORT_TRIES = 100


@dataclass(frozen=True, slots=True)
class VllmCommand:
    """What to run, and where it will answer."""

    program: str
    """Absolute path."""
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """On top of the driver's own."""
    url: str


def find_program(name: str, env: Mapping[str, str]) -> str:
    """Absolute path of a program.

    Raises:
        CannotStart: it is not there.
    """
    path = shutil.which(name, path=env.get("PATH", os.environ.get("PATH")))
    if path is None and name == DEFAULT_COMMAND[0]:
        raise CannotStart(
            "the command `vllm` is not on PATH: `pip install rollyard[vllm]`, "
            "or name what starts vLLM's API server in spec.engine.command"
        )
    if path is None:
        raise CannotStart(f"spec.engine.command: {name!r} is no program that can be run here")
    return os.path.abspath(path)


def free_port(host: str, taken: Collection[int]) -> int:
    """A port that nothing listens on and none of `taken`. Who loses the race for it starts again elsewhere.

    Raises:
        OSError: the host is not one of this machine, or no port is free.
    """
    for _ in range(PORT_TRIES):
        with socket.create_server((host, 0)) as probe:
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port
    raise OSError(f"no free port on {host} after {PORT_TRIES} tries")


def vllm_server(workload: Workload, host: str, port: int, gpus: Sequence[str]) -> VllmCommand:
    """The server that a workload means. What the user's arguments say is not said again.

    Args:
        port: a free one; unused where the arguments give `--port`.
        gpus: what the server may see of the machine's; empty: it is not restricted.

    Raises:
        CannotStart: there is no such program, or no such model folder.
    """
    env = dict(SERVER_ENV)
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    env |= dict(workload.env)
    if workload.model.startswith(("/", ".", "~")) and not os.path.isdir(workload.model):
        raise CannotStart(f"spec.model: there is no folder {workload.model!r} on this machine")
    program, *arguments = vllm_command(workload, host, port)
    url = f"http://{host}:{given_port(workload.args, port)}"
    return VllmCommand(find_program(program, env), tuple(arguments), env, url)
