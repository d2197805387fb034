"""The command lines of stage workers and backends, as every driver starts them. The module is pure."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from rollyard_crds.reading.engine_arguments import is_given

from rollyard_drivers.reconcile.plan import Owner, Workload

WORKER_MODULE: Final = ("-m", "rollyard_pipeline")
"""The arguments that select the module for Python to run."""


def worker_arguments(workload: Workload, url: str, token_file: str | PurePath) -> tuple[str, ...]:
    """Return the arguments that say what a worker works on.

    The arguments about sandboxes differ between drivers and are not included.

    Args:
        workload: The stage worker to start.
        url: The base URL of the control plane, as the worker reaches it.
        token_file: The path of the file with the token of the worker's job, as the worker sees it.
    """
    return ("--url", url, "--token-file", str(token_file), *work_arguments(workload))


def ready_arguments(owner: Owner, url: str, token_file: str | PurePath) -> tuple[str, ...]:
    """Return the arguments of a worker that stands ready until a job of its namespace is assigned to it.

    Args:
        owner: The ready worker, which names itself and its namespace.
        url: The base URL of the control plane, as the worker reaches it.
        token_file: The path of the file with the token of the ready worker, as the worker sees it.
    """
    return (
        *("--url", url, "--token-file", str(token_file), "--namespace", owner.namespace),
        *("--ready", owner.name),
    )


def work_arguments(workload: Workload) -> tuple[str, ...]:
    """Return the arguments that say which job and which stages a worker works on."""
    concurrency = ",".join(f"{stage}={number}" for stage, number in workload.concurrency)
    return (
        *("--job", workload.owner.name, "--namespace", workload.owner.namespace),
        *("--stages", ",".join(workload.stages), "--concurrency", concurrency),
    )


ENGINE_MODULE: Final = ("-m", "rollyard_engine")
"""The arguments that select the module for Python to run."""


def engine_arguments(
    workload: Workload,
    host: str,
    port: int | str,
    port_file: str | PurePath | None = None,
    folder: str = "",
) -> tuple[str, ...]:
    """Return the arguments of the engine. Those of the pool come last and therefore take precedence.

    Args:
        workload: The backend to start.
        host: The address that the engine listens on.
        port: The port that the engine listens on. The value 0 selects a free port.
        port_file: The file that the engine writes its port into once it serves. With None, it writes no file.
        folder: The folder of the model, if `workload.model` is its name on the hub.
    """
    return (
        *("--model", folder or workload.model, "--host", host, "--port", str(port)),
        *(() if port_file is None else ("--port-file", str(port_file))),
        *("--served-model-name", workload.model, *workload.args),
    )


DEFAULT_COMMAND: Final = ("vllm", "serve")
SERVER_ENV: Final = {"VLLM_SERVER_DEV_MODE": "1"}
"""The environment that enables the calls for weight updates and for resets of the prefix cache."""


def vllm_command(workload: Workload, host: str, port: int | str, folder: str = "") -> tuple[str, ...]:
    """Return the program and its arguments. An option that the user has given is not added again.

    Args:
        workload: The backend to start.
        host: The address that the server listens on.
        port: The port that the server listens on. It is not used if the user's arguments contain `--port`.
        folder: The folder of the model, if `workload.model` is its name on the hub.
    """
    args = workload.args
    program, *rest = workload.command or DEFAULT_COMMAND
    arguments = list(rest)
    # `vllm serve` takes the model as an argument, whereas the module takes it as a flag.
    model = folder or workload.model
    arguments += [model] if rest[-1:] == ["serve"] else ["--model", model]
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
