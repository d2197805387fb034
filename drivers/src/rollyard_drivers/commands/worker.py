"""The command line of a stage worker, as every driver starts it. The module is pure."""

from __future__ import annotations

from pathlib import PurePath

from rollyard_drivers.reconcile.plan import Owner, Workload

WORKER_MODULE = ("-m", "rollyard_pipeline")
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
    given = ("--url", url, "--token-file", str(token_file), "--namespace", owner.namespace)
    return (*given, "--ready", owner.name)


def work_arguments(workload: Workload) -> tuple[str, ...]:
    """Return the arguments that say which job and which stages a worker works on."""
    concurrency = ",".join(f"{stage}={number}" for stage, number in workload.concurrency)
    return (
        *("--job", workload.owner.name, "--namespace", workload.owner.namespace),
        *("--stages", ",".join(workload.stages), "--concurrency", concurrency),
    )
