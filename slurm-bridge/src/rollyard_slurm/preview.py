"""`--dry-run`: the batch scripts that jobs and pools would become."""

from __future__ import annotations

from collections.abc import Iterable

from rollyard_crds import BackendPool, RolloutJob
from rollyard_operator.pools import pool_workloads
from rollyard_operator.reconcile import job_workloads

from rollyard_slurm.identity import identity
from rollyard_slurm.node import base_url
from rollyard_slurm.options import BridgeOptions, reconcile_profile
from rollyard_slurm.script import Site, batch_script


def sample_job() -> RolloutJob:
    """A job as plain as can be, for the script of its worker."""
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "sample"}, "spec": spec})


def scripts(options: BridgeOptions, things: Iterable[RolloutJob | BackendPool]) -> list[str]:
    """The script of each worker and backend. Address, port and numbers that are not known yet are samples."""
    host = options.advertise or options.listen or "BRIDGE-ADDRESS"
    site = Site(
        home=options.home,
        instance="00000000",
        url=base_url(host, options.port or 8765),
        profile=options.profile,
        sandbox=options.sandbox,
        sandbox_options=options.sandbox_options,
    )
    profile = reconcile_profile(site, options.max_jobs)
    made = []
    for thing in things:
        workloads = (
            job_workloads(thing, profile) if isinstance(thing, RolloutJob) else pool_workloads(thing, profile)
        )
        made += [
            batch_script(one, site, identity(one, site.instance, "000000000000", 0)).text()
            for one in workloads
        ]
    return made
