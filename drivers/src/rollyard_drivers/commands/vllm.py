"""The command line of a vLLM server, as every driver starts it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollyard_drivers.reconcile.plan import Workload

DEFAULT_COMMAND = ("vllm", "serve")
SERVER_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the calls of weight updates and of resets of the prefix cache."""


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


def vllm_command(workload: Workload, host: str, port: int | str) -> tuple[str, ...]:
    """Program and arguments. What the user's arguments say is not said again.

    Args:
        port: unused where the arguments give `--port`.
    """
    args = workload.args
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
    return (program, *arguments, *args)


def vllm_port(workload: Workload, port: int) -> int:
    """Where it listens: what the user's arguments say, else `port`."""
    chosen = given(workload.args, "--port")
    return int(chosen) if chosen.isdigit() else port
