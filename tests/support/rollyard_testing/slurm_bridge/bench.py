"""A bridge without its processes, over a Slurm in memory."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from rollyard_crds import RolloutJob
from rollyard_drivers.loop.driver import Driver
from rollyard_slurm.options import reconcile_profile
from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.workloads import SlurmWorkloads

from rollyard_testing.slurm_bridge.fakeslurm import FakeSlurm, FakeStore


def job(name: str = "qs", replicas: int = 1) -> RolloutJob:
    stage = {"replicas": replicas}
    return RolloutJob.model_validate(
        {
            "metadata": {"name": name, "uid": "12345678-aaaa"},
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "agent": {"type": "oracle"},
                "stages": {"init": stage, "run": stage, "eval": stage},
            },
        }
    )


class Bench:
    """A bridge without its processes: fleet and driver over what is in memory."""

    def __init__(self, home: Path, http: httpx.AsyncClient, *jobs: RolloutJob, **profile: Any) -> None:
        self.slurm, self.store = FakeSlurm(), FakeStore(list(jobs))
        self.site = Site(home, "abcd1234", "http://h:1", SiteProfile.model_validate(profile), python="py")
        for folder in (self.site.logs, self.site.endpoints, self.site.tokens):
            folder.mkdir(parents=True)
        self.now = datetime.now(UTC)
        self.said: list[str] = []
        self._http = http
        self.begin()

    def begin(self) -> None:
        """Start a bridge on the home, as after a kill."""
        token, wake, say = lambda owner: "secret", lambda: None, self.said.append
        self.fleet = SlurmWorkloads(self.site, self.slurm, self._http, token, wake, say)
        self.driver = Driver(self.store, self.fleet, reconcile_profile(self.site))

    async def turns(self, count: int = 3, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += timedelta(seconds=seconds)
            self.fleet.find_endpoints()
            await self.fleet.poll(self.now)
            if self.fleet.ready:
                await self.driver.run_pass(self.now)
                await self.fleet.act(self.now)

    def said_of(self, kind: str = "Running", part: str = "message") -> str:
        (only,) = self.store.listed
        return next((str(getattr(one, part)) for one in only.status.conditions if one.type == kind), "")
