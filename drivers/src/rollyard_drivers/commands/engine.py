"""The command line of the embedded engine, as every driver starts it. Pure."""

from __future__ import annotations

from pathlib import PurePath

from rollyard_drivers.reconcile.plan import Workload

ENGINE_MODULE = ("-m", "rollyard_engine")
"""What Python runs."""


def engine_arguments(
    workload: Workload, host: str, port: int | str, port_file: str | PurePath | None = None
) -> tuple[str, ...]:
    """The engine's arguments; those of the pool come last, so that they win.

    Args:
        host: the address that it listens on.
        port: 0 picks a free one.
        port_file: the file that the engine writes its port into once it serves; None: it writes none.
    """
    return (
        *("--model", workload.model, "--host", host, "--port", str(port)),
        *(() if port_file is None else ("--port-file", str(port_file))),
        *("--served-model-name", workload.model, *workload.args),
    )
