"""Health checks of the backends on the nodes; they begin once a backend has announced where it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import httpx
from rollyard_drivers.health.backend import BackendHealth, watch_backend
from rollyard_drivers.host.home import read_json

from rollyard_slurm.readers.jobs import PENDING_STATES
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.submission import Submission


class BackendHealthChecks:
    """The health checks of one bridge.

    Args:
        changed: Is called with a backend that became ready, or is not ready any longer.
    """

    def __init__(self, site: Site, http: httpx.AsyncClient, changed: Callable[[Submission], None]) -> None:
        self._site = site
        self._http = http
        self._changed = changed

    def find(self, one: Submission) -> bool:
        """Begins to check a backend that has announced where it answers.

        Returns:
            Whether the backend has started and squeue has not shown it yet, so that polling is worth while.
        """
        path = self._site.endpoint_file(one.launch)
        if one.seen is None or one.seen.state in PENDING_STATES:
            return one.job is not None and path.exists()
        if not one.running:
            return False
        document = read_json(path) or {}
        url = document.get("url")
        if isinstance(url, str) and document.get("job") == str(one.job):
            self._check(one, url)
        return False

    def _check(self, one: Submission, url: str) -> None:
        if one.probe is not None and one.url == url:
            return
        if one.url != url:  # Slurm has started it again on another node
            one.health = BackendHealth(url=url)
        self.pause(one)
        one.url = url

        def report(health: BackendHealth) -> None:
            before, one.health = one.health, health
            if before.ready != health.ready:
                self._changed(one)

        one.probe = asyncio.create_task(
            watch_backend(url, one.workload.model, self._http, report, one.health),
            name=f"health of {one.workload.name}",
        )

    def pause(self, one: Submission) -> None:
        """Ends the check of a backend; its last known health stays."""
        if one.probe is not None:
            one.probe.cancel()
            one.probe = None

    def end(self, one: Submission) -> None:
        """Ends the check of a backend that does not run, and forgets its health."""
        self.pause(one)
        one.health, one.url = BackendHealth(), ""
        self._site.endpoint_file(one.launch).unlink(missing_ok=True)

    async def close(self, submissions: Iterable[Submission]) -> None:
        """Ends all checks."""
        probes = [one.probe for one in submissions if one.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
