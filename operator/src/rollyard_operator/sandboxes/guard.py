"""Keep the network of sandboxes closed, as far as NetworkPolicies show it, and report what is not proven."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import CLAIM, JOB, Object, label_of
from rollyard_operator.kube.object_cache import uid_of
from rollyard_operator.sandboxes.namespaces import Namespaces
from rollyard_operator.sandboxes.refusals import NOT_ISOLATED

LOOK_SECONDS = 30.0
"""The time between two looks at the policies that apply to the sandboxes in use, in seconds."""
REMEMBERED = 4096
"""The number of jobs for which the operator remembers that an event has named what is not proven."""
Jobs = Callable[[str, str], Object | None]
"""A function that finds the object of a job by namespace and name."""
_log = logging.getLogger(__name__)


class Guard:
    """Checks the policies of a namespace before a sandbox is made there and before it is handed out.

    Args:
        doubt: Returns what the checks inside the sandboxes do not prove, or an empty string if they prove
            everything.
    """

    def __init__(self, kube: Kube, namespaces: Namespaces, doubt: Callable[[], str]) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._doubt = doubt
        self._told: dict[str, None] = {}
        self._open: set[str] = set()

    async def close(self, namespace: str, labels: Mapping[str, str]) -> None:
        """Make sure that the sandboxes' network policy exists and that no other policy undoes it.

        Raises:
            KubeError: Another policy opens the network (reason `NotIsolated`), or the API server does not
                answer.
        """
        await self._namespaces.close(namespace)
        if await self._namespaces.open_to(namespace, labels):
            # The operator's own policy may have been deleted or changed since it was applied.
            self._namespaces.forget(namespace)
            await self._namespaces.close(namespace)
            if opened := await self._namespaces.open_to(namespace, labels):
                raise KubeError(0, NOT_ISOLATED, opened)

    async def opened(self, pod: Object) -> str:
        """Return why a sandbox that was closed when it started is open now, or an empty string."""
        meta = pod["metadata"]
        opened = await self._namespaces.open_to(meta["namespace"], meta.get("labels") or {})
        if opened:
            self._namespaces.forget(meta["namespace"])
        return opened

    async def run(self, pods: Callable[[], Iterable[Object]], jobs: Jobs) -> None:
        """Check the sandboxes in use every LOOK_SECONDS until cancelled. See `look`."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(pods(), jobs)
            except KubeError as error:
                _log.warning("policies that may have opened sandboxes: %s", error)

    async def look(self, pods: Iterable[Object], jobs: Jobs) -> None:
        """Create an event for each job whose sandboxes in use are not closed any more.

        There is one event per job until its sandboxes are closed again. The sandboxes keep running: only
        a user who may write policies in the namespace of a job can open them.

        Args:
            pods: All sandbox pods.
            jobs: Finds the object of a job.

        Raises:
            KubeError: The API server does not answer.
        """
        opened: dict[str, tuple[Object, str]] = {}
        for pod in list(pods):
            namespace, name = pod["metadata"]["namespace"], label_of(pod, JOB)
            job = jobs(namespace, name) if label_of(pod, CLAIM) else None
            if job is not None and uid_of(job) not in opened and (why := await self.opened(pod)):
                opened[uid_of(job)] = job, why
        news, self._open = opened.keys() - self._open, set(opened)
        for uid in news:
            job, why = opened[uid]
            await self._kube.event(job, "Warning", "SandboxesOpened", f"sandboxes in use: {why}"[:1024])

    async def tell_doubt(self, job: Object | None) -> None:
        """Create one event for a job if the isolation of its sandboxes is only partly proven."""
        doubt = self._doubt()
        if job is None or not doubt or uid_of(job) in self._told:
            return
        self._told[uid_of(job)] = None
        while len(self._told) > REMEMBERED:
            self._told.pop(next(iter(self._told)))
        await self._kube.event(job, "Normal", "IsolationPartlyProven", doubt)
