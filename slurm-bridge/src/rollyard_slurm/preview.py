"""The previews of `--dry-run`, which show the batch scripts of jobs and pools, and slurmrestd's fields."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rollyard_client.unixsocket import socket_url
from rollyard_crds import BackendPool, RolloutJob
from rollyard_drivers.reconcile.job import job_workloads
from rollyard_drivers.reconcile.plan import Workload
from rollyard_drivers.reconcile.pool import pool_workloads

from rollyard_slurm.calls.rest import RestCalls, slurm_calls
from rollyard_slurm.errors import SlurmUnavailable
from rollyard_slurm.node import base_url
from rollyard_slurm.options import SOCKET_NAME, UNIX, BridgeOptions, reconcile_profile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import BatchScript, batch_script
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.ready_workers import DEFAULT_NAMESPACE, ready_workload


def sample_job() -> RolloutJob:
    """Return a minimal job, whose only purpose is to show the script of a worker."""
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "sample"}, "spec": spec})


def _url(options: BridgeOptions) -> str:
    if options.join:
        return options.join.rstrip("/")
    if options.listen == UNIX:
        return socket_url(str(options.home / "state" / SOCKET_NAME))
    scheme = "https" if options.plane.get("tls-cert") else "http"
    return base_url(options.advertise or options.listen or "BRIDGE-ADDRESS", options.port or 8765, scheme)


def batches(options: BridgeOptions, things: Iterable[RolloutJob | BackendPool]) -> list[BatchScript]:
    """Return the batch script of each worker and backend of some jobs and pools, and of ready workers.

    Sample values stand for what is not known yet, such as a port.
    """
    site = options.site("00000000", _url(options))
    profile = reconcile_profile(site, options.max_jobs)
    scripts = []
    for thing in things:
        workloads = (
            job_workloads(thing, profile) if isinstance(thing, RolloutJob) else pool_workloads(thing, profile)
        )
        scripts += [_batch(workload, site) for workload in workloads]
    if options.profile.workers.ready:
        namespaces = options.namespaces or (DEFAULT_NAMESPACE,)
        scripts += [
            _batch(ready_workload(namespace, "ready-0000000000000000", site), site)
            for namespace in namespaces
        ]
    return scripts


def _batch(workload: Workload, site: Site) -> BatchScript:
    return batch_script(workload, site, SlurmJobIdentity.of(workload, site.instance, "000000000000", 0))


async def scripts(options: BridgeOptions, things: Iterable[RolloutJob | BackendPool]) -> list[str]:
    """Return the text of each script. With slurmrestd, the text also contains the fields of the submission.

    slurmrestd is asked for its version, because the fields depend on it.

    Raises:
        SlurmError: slurmrestd does not have the wanted version.
    """
    batch_scripts = batches(options, things)
    calls = slurm_calls(options.profile.rest, options.timeout, options.home, options.profile.pass_env)
    if not isinstance(calls, RestCalls):
        return [script.text() for script in batch_scripts]
    texts = []
    for script in batch_scripts:
        try:
            body = await calls.fields(script)
            version = (await calls.server.api()).version
        except SlurmUnavailable as trouble:
            texts.append(f"{script.text()}\n# fields for slurmrestd: not known: {trouble}\n")
            continue
        # The environment is left out: it may hold private values, and users may show the preview to others.
        job = {name: value for name, value in body["job"].items() if name != "environment"}
        text = json.dumps(job, indent=2)
        texts.append(
            f"{body['script']}\n# fields for slurmrestd (v0.0.{version}), beside an environment:\n{text}\n"
        )
    return texts
