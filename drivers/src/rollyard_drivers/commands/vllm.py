"""The command line of a vLLM server, as every driver starts it. The module is pure."""

from __future__ import annotations

from rollyard_crds.reading.engine_arguments import is_given

from rollyard_drivers.reconcile.plan import Workload

DEFAULT_COMMAND = ("vllm", "serve")
SERVER_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
"""The environment that enables the calls for weight updates and for resets of the prefix cache."""


def vllm_command(workload: Workload, host: str, port: int | str) -> tuple[str, ...]:
    """Return the program and its arguments. An option that the user has given is not added again.

    Args:
        workload: The backend to start.
        host: The address that the server listens on.
        port: The port that the server listens on. It is not used if the user's arguments contain `--port`.
    """
    args = workload.args
    program, *rest = workload.command or DEFAULT_COMMAND
    arguments = list(rest)
    # `vllm serve` takes the model as an argument, whereas the module takes it as a flag.
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
