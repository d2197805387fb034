"""Health checks of the backends on the nodes.

The check of a backend begins when the backend has announced its URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import httpx
from rollyard_drivers.health import BackendHealth, watch_backend
from rollyard_drivers.host.home import read_json

from rollyard_slurm.readers.jobs import PENDING_STATES
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.submission import Submission


class BackendHealthChecks:
    """The health checks of one bridge.

    Args:
        changed: A function that is called with each backend that becomes ready or stops being ready.
    """

    def __init__(self, site: Site, http: httpx.AsyncClient, changed: Callable[[Submission], None]) -> None:
        self._site = site
        self._http = http
        self._changed = changed

    def find(self, submission: Submission) -> bool:
        """Begin to check a backend, if it has announced its URL.

        Returns:
            Whether the backend has started and squeue has not shown this yet. In this case, Slurm should be
            polled soon.
        """
        path = self._site.endpoint_file(submission.launch)
        if submission.seen is None or submission.seen.state in PENDING_STATES:
            return submission.job is not None and path.exists()
        if not submission.running:
            return False
        document = read_json(path) or {}
        url = document.get("url")
        if isinstance(url, str) and document.get("job") == str(submission.job):
            self._check(submission, url)
        return False

    def _check(self, submission: Submission, url: str) -> None:
        """Begin the health check of a backend at a URL, unless it runs already."""
        if submission.probe is not None and submission.url == url:
            return
        if submission.url != url:  # Slurm has started the backend again on another node.
            submission.health = BackendHealth(url=url)
        self.pause(submission)
        submission.url = url

        def report(health: BackendHealth) -> None:
            before, submission.health = submission.health, health
            if before.ready != health.ready:
                self._changed(submission)

        submission.probe = asyncio.create_task(
            watch_backend(url, submission.workload.model, self._http, report, submission.health),
            name=f"health of {submission.workload.name}",
        )

    def pause(self, submission: Submission) -> None:
        """End the check of a backend, and keep its last known health."""
        if submission.probe is not None:
            submission.probe.cancel()
            submission.probe = None

    def end(self, submission: Submission) -> None:
        """End the check of a backend that does not run, and forget its health and its URL."""
        self.pause(submission)
        submission.health, submission.url = BackendHealth(), ""
        self._site.endpoint_file(submission.launch).unlink(missing_ok=True)

    async def close(self, submissions: Iterable[Submission]) -> None:
        """End the checks of all given submissions, and wait until they have ended."""
        probes = [submission.probe for submission in submissions if submission.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
