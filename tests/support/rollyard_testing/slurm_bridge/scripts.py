"""The batch script of a workload, and a site to render it for."""

from __future__ import annotations

from pathlib import Path

from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.scripts.site import Site

OWNER = Owner("RolloutJob", "default", "qs", "12345678-aaaa")

WORKER = Workload(
    name="qs-12345678-worker-0",
    kind="stage-worker",
    owner=OWNER,
    stages=("init", "run", "eval"),
    concurrency=(("init", 4), ("run", 8), ("eval", 2)),
)


def site(profile: SiteProfile | None = None, **changes: object) -> Site:
    given = {
        "home": Path("/shared/h"),
        "instance": "abcd1234",
        "url": "http://10.0.0.1:9000",
        "profile": profile or SiteProfile(),
        "python": "/env/bin/python",
        **changes,
    }
    return Site(**given)  # type: ignore[arg-type]


def script(workload: Workload, of: Site) -> str:
    return batch_script(workload, of, SlurmJobIdentity.of(workload, of.instance, "ffff00000000", 3)).text()
