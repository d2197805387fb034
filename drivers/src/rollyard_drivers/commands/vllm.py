"""The command line of a vLLM server, as every driver starts it. Pure."""

from __future__ import annotations

from rollyard_drivers.commands.arguments import is_given
from rollyard_drivers.reconcile.plan import Workload

DEFAULT_COMMAND = ("vllm", "serve")
SERVER_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Opens the calls of weight updates and of resets of the prefix cache."""


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
        if not is_given(args, flag):
            arguments += [flag, value]
    for flag in ("--enable-scale-out", "--enable-prompt-tokens-details"):
        if not is_given(args, flag, flag.replace("--", "--no-", 1)):
            arguments.append(flag)
    return (program, *arguments, *args)
