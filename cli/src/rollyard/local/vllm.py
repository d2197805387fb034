"""The command line and environment of one vLLM server, and where its program is."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollyard_operator.plan import Workload

from rollyard.errors import CannotStart

API_SERVER = "vllm.entrypoints.openai.api_server"
DEFAULT_COMMAND = ("vllm", "serve")
PORT_TRIES = 100


@dataclass(frozen=True, slots=True)
class Server:
    """What to run, and where it will answer."""

    program: str
    """Absolute path."""
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    """On top of the driver's own."""
    url: str


def _flag(argument: str) -> str:
    """`--max-model-len` of `--max_model_len=4096`: vLLM takes both spellings."""
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else ""


def _has(args: Iterable[str], *flags: str) -> bool:
    return any(_flag(argument) in flags for argument in args)


def given(args: Sequence[str], flag: str) -> str:
    """The value of a flag in `args`, as the last one says; empty if it is not there."""
    value = ""
    for place, argument in enumerate(args):
        if _flag(argument) == flag:
            _name, equals, rest = argument.partition("=")
            value = rest if equals else args[place + 1] if place + 1 < len(args) else ""
    return value


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


def vllm_server(workload: Workload, host: str, port: int, gpus: Sequence[str]) -> Server:
    """The server that a workload means. What the user's arguments say is not said again.

    Args:
        port: a free one; unused where the arguments give `--port`.
        gpus: what the server may see of the machine's; empty: it is not restricted.

    Raises:
        CannotStart: there is no such program, or no such model folder.
    """
    args = workload.args
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    env |= dict(workload.env)
    if workload.model.startswith(("/", ".", "~")) and not os.path.isdir(workload.model):
        raise CannotStart(f"spec.model: there is no folder {workload.model!r} on this machine")
    program, *rest = workload.command or DEFAULT_COMMAND
    arguments = list(rest)
    # `vllm serve MODEL`; the module itself takes it as a flag.
    arguments += [workload.model] if rest[-1:] == ["serve"] else ["--model", workload.model]
    for flag, value in (
        ("--served-model-name", workload.model),
        ("--host", host),
        ("--port", str(port)),
        ("--logprobs-mode", "processed_logprobs"),
    ):
        if not _has(args, flag):
            arguments += [flag, value]
    for flag in ("--enable-scale-out", "--enable-prompt-tokens-details"):
        if not _has(args, flag, flag.replace("--", "--no-", 1)):
            arguments.append(flag)
    chosen = given(args, "--port")
    number = chosen if chosen.isdigit() else str(port)
    return Server(find_program(program, env), (*arguments, *args), env, f"http://{host}:{number}")
