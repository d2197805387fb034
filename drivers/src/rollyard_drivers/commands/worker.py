"""The command line of a stage worker, as every driver starts it. Pure."""

from __future__ import annotations

from pathlib import PurePath

from rollyard_drivers.reconcile.plan import Workload

WORKER_MODULE = ("-m", "rollyard_pipeline")
"""What Python runs."""


def worker_arguments(workload: Workload, url: str, token_file: str | PurePath) -> tuple[str, ...]:
    """The arguments that tell a worker what to work on; those about sandboxes differ between drivers.

    Args:
        url: the control plane, as the worker reaches it.
        token_file: the file with the token of its job, as the worker sees it.
    """
    concurrency = ",".join(f"{stage}={number}" for stage, number in workload.concurrency)
    return (
        *("--url", url, "--token-file", str(token_file)),
        *("--job", workload.owner.name, "--namespace", workload.owner.namespace),
        *("--stages", ",".join(workload.stages), "--concurrency", concurrency),
    )
