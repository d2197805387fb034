"""The command line of the embedded engine, as every driver starts it. The module is pure."""

from __future__ import annotations

from pathlib import PurePath

from rollyard_drivers.reconcile.plan import Workload

ENGINE_MODULE = ("-m", "rollyard_engine")
"""The arguments that select the module for Python to run."""


def engine_arguments(
    workload: Workload, host: str, port: int | str, port_file: str | PurePath | None = None
) -> tuple[str, ...]:
    """Return the arguments of the engine. Those of the pool come last and therefore take precedence.

    Args:
        workload: The backend to start.
        host: The address that the engine listens on.
        port: The port that the engine listens on. The value 0 selects a free port.
        port_file: The file that the engine writes its port into once it serves. With None, it writes no file.
    """
    return (
        *("--model", workload.model, "--host", host, "--port", str(port)),
        *(() if port_file is None else ("--port-file", str(port_file))),
        *("--served-model-name", workload.model, *workload.args),
    )
