"""A bridge without its processes, over a Slurm in memory."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from rollyard_crds import RolloutJob
from rollyard_drivers.loop.driver import Driver
from rollyard_drivers.reconcile.plan import Owner
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
        self._home = home
        self.profile(**profile)
        for folder in (self.site.logs, self.site.endpoints, self.site.tokens):
            folder.mkdir(parents=True)
        self.now = datetime.now(UTC)
        self.said: list[str] = []
        self.token_of: Callable[[Owner], str] = lambda owner: "secret"
        self._http = http
        self.begin()

    def profile(self, **profile: Any) -> None:
        """Set the profile of the next bridge."""
        self.site = Site(
            self._home, "abcd1234", "http://h:1", SiteProfile.model_validate(profile), python="py"
        )

    def begin(self, namespaces: tuple[str, ...] = ("default",)) -> None:
        """Start a bridge on the home, as after a kill."""
        wake, say = lambda: None, self.said.append
        self.fleet = SlurmWorkloads(
            self.site, self.slurm, self._http, self.token_of, wake, say, namespaces=namespaces
        )
        self.driver = Driver(self.store, self.fleet, reconcile_profile(self.site))

    async def turns(self, count: int = 3, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += timedelta(seconds=seconds)
            self.fleet.find_endpoints()
            await self.fleet.poll(self.now)
            if self.fleet.ready:
                await self.driver.run_pass(self.now)
                await self.fleet.keep_ready(self.now, self.store.offer)
                await self.fleet.act(self.now)

    async def until_running(self) -> None:
        """Let what is wanted be submitted, and the first job run."""
        await self.turns()
        self.slurm.run(101)
        await self.turns()

    def said_of(self, kind: str = "Running", part: str = "message") -> str:
        (only,) = self.store.listed
        return next((str(getattr(one, part)) for one in only.status.conditions if one.type == kind), "")
