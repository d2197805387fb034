"""Ready stage workers of one installation: they are kept at their number, and taken for new jobs.

Everything that matters is in the cluster: a label says that a pod has no job yet, and one patch of the
version that was seen gives the pod its job. The offer to the control plane follows, and is repeated until it
is answered. The operator may therefore be killed between any two steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Final

from rollyard_client import DriverClient, RollyardError
from rollyard_crds import RolloutJob
from rollyard_drivers.loop.driver import run_passes
from rollyard_drivers.reconcile.plan import Launch
from rollyard_drivers.reconcile.ready_workers import JOB_OVER, ReadyWorker, choose, plan_ready
from rollyard_process.backoff import Backoff

from rollyard_operator.controllers.worker_token import WorkerToken
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache, key_of, uid_of
from rollyard_operator.pods.parts import digest
from rollyard_operator.pods.ready_workers import (
    assigned,
    observed_ready,
    offer_of,
    ready_pod,
    ready_secret,
    takes_ready,
)
from rollyard_operator.pods.sandboxes import warm_owner, warm_reference
from rollyard_operator.settings import OperatorSettings

PASS_SECONDS: Final = 30.0
"""The longest time between two passes, in seconds."""
TOGETHER_SECONDS: Final = 0.2
"""Changes of pods come in groups. Those within this many seconds share a pass."""
AT_ONCE: Final = 16
"""The number of simultaneous calls to the API server."""
TRIES: Final = 4
"""The number of ready pods that are tried for one worker, if other operators take them at the same time."""
REFUSED_SECONDS: Final = 60.0
"""The time in which no ready pod is taken after the control plane has refused an offer, in seconds."""
REMEMBERED: Final = 4096
_PAUSES: Final = Backoff(first=2.0, longest=120.0)
_log = logging.getLogger(__name__)


class ReadyPool:
    """The ready pods of one installation.

    Args:
        pods: The cache of all pods of this installation.
        namespaces: Returns the namespaces in which ready workers stand.
    """

    def __init__(
        self,
        kube: KubeClient,
        pods: PodCache,
        client: DriverClient,
        token: WorkerToken,
        settings: OperatorSettings,
        made_of: str,
        namespaces: Callable[[], Collection[str]],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._pods = pods
        self._client = client
        self._token = token
        self._settings = settings
        self._made_of = made_of
        self._namespaces = namespaces
        self._now = now
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._with_secret: set[str] = set()
        self._taken: dict[str, None] = {}
        self._offered: dict[str, None] = {}
        self._failures: dict[str, int] = {}
        self._resting: dict[str, float] = {}
        self._refused_until = 0.0
        self._trouble = ""

    async def run(self) -> None:
        """Keep the pods at their number until cancelled. Return once there are none and none are wanted."""
        wake = asyncio.Event()
        self._pods.listen(lambda pod: wake.set())
        await run_passes(
            self._safe_pass,
            wake,
            PASS_SECONDS,
            done=lambda: not self._settings.ready_workers and not self._standing(),
        )

    async def _safe_pass(self) -> float:
        await asyncio.sleep(TOGETHER_SECONDS)
        try:
            return await self.run_pass()
        except Exception:
            # A bug here must not end the loops of all jobs.
            _log.exception("ready workers: a pass failed")
            return PASS_SECONDS

    def _standing(self) -> list[Object]:
        """Return the pods that have no job yet."""
        pods = self._pods.pods(component="stage-worker")
        return [pod for pod in pods if labels.label_of(pod, labels.READY) and uid_of(pod) not in self._taken]

    def _shape(self) -> str:
        return digest(self._made_of, self._token.state())

    # The number of ready pods

    async def run_pass(self) -> float:
        """Make and delete what is needed now, and return the seconds until the next pass."""
        clock = asyncio.get_running_loop().time()
        self._resting = {namespace: end for namespace, end in self._resting.items() if end > clock}
        try:
            shape = self._shape()
        except KubeError as error:
            self._report(str(error))
            return PASS_SECONDS
        pods = self._standing()
        count = self._settings.ready_workers
        namespaces = self._namespaces() if count else ()
        observed = [observed_ready(pod) for pod in pods]
        plan = plan_ready(observed, namespaces, count, shape, self._now(), self._resting)
        for namespace in plan.broken:
            self._rest(namespace)
        there = {uid_of(pod) for pod in pods}
        self._with_secret &= there
        kept = there - {worker.uid for worker in plan.delete}
        steps = [self._step(f"{one.namespace}/{one.name}", partial(self._delete, one)) for one in plan.delete]
        steps += [
            # An operator that was killed may have left a pod without its Secret.
            self._step("/".join(key_of(pod)), partial(self._make_secret, pod))
            for pod in pods
            if uid_of(pod) in kept - self._with_secret
        ]
        steps += [
            self._step(
                f"none can be made in namespace {namespace}", partial(self._create, namespace, number, shape)
            )
            for namespace, number in plan.create.items()
        ]
        fine = await asyncio.gather(*steps)
        if all(fine):
            self._report("")
        ends = [end - clock for end in self._resting.values()]
        return min([PASS_SECONDS, *ends]) if all(fine) else min([_PAUSES.first, *ends])

    def _rest(self, namespace: str) -> None:
        """Make no pods in a namespace for a while, which grows with each failure in a row."""
        self._failures[namespace] = self._failures.get(namespace, 0) + 1
        pause = _PAUSES.pause(self._failures[namespace])
        self._resting[namespace] = asyncio.get_running_loop().time() + pause

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            _log.warning("ready workers: %s", trouble)
        self._trouble = trouble

    async def _step(self, what: str, step: Callable[[], Awaitable[None]]) -> bool:
        """Return whether the step succeeded. A step that failed is planned again in the next pass."""
        async with self._at_once:
            try:
                await step()
            except KubeError as error:
                self._report(f"{what}: {error}")
                return False
            return True

    async def _delete(self, worker: ReadyWorker) -> None:
        if worker.uid in self._taken:
            return  # A job has taken it since the plan was made.
        _remember(self._taken, worker.uid)
        try:
            await self._kube.delete("Pod", worker.namespace, worker.name, grace=1, uid=worker.uid)
        except KubeError:
            self._taken.pop(worker.uid, None)
            raise

    async def _create(self, namespace: str, number: int, shape: str) -> None:
        try:
            owner = await self._kube.apply(warm_owner(namespace, self._settings))
            reference = warm_reference(owner["metadata"]["name"], uid_of(owner))
            for _ in range(number):
                # The name is random, because a token is made of it and is never valid for another pod.
                name = f"{labels.READY_PREFIX}{secrets.token_hex(8)}"
                made = await self._kube.create(ready_pod(name, namespace, self._settings, shape, reference))
                await self._make_secret(made)
                self._pods.put(made)
        except KubeError:
            self._rest(namespace)
            raise

    async def _make_secret(self, pod: Object) -> None:
        data = self._token.of_ready(*key_of(pod))
        # A Secret that exists already has the same content, which follows from the pod's name.
        with suppress(KubeConflict):
            await self._kube.create(ready_secret(pod, data, self._settings))
        self._with_secret.add(uid_of(pod))

    # Assignments

    async def take(self, launch: Launch, job: RolloutJob) -> Object | None:
        """Make a ready pod the worker of a job, and return the pod, or None if none is ready or fits.

        Raises:
            KubeError: The API server does not answer.
        """
        loop = asyncio.get_running_loop()
        if not self._settings.ready_workers or loop.time() < self._refused_until:
            return None
        if not takes_ready(launch, job):
            return None
        for _ in range(TRIES):
            observed = [observed_ready(pod) for pod in self._standing()]
            chosen = choose(observed, job.metadata.namespace, self._shape())
            pod = self._pods.get((chosen.namespace, chosen.name)) if chosen is not None else None
            if pod is None:
                return None
            uid = uid_of(pod)
            # No other job of this operator tries it from now on, whatever the answer is.
            _remember(self._taken, uid)
            patch = assigned(pod, launch.workload, job, self._settings, self._now())
            version = str(pod["metadata"]["resourceVersion"])
            try:
                taken = await self._kube.patch("Pod", *key_of(pod), patch, uid=uid, version=version)
            except KubeConflict:
                # Its status has changed, or another operator has taken it. The newest version says which.
                newest = await self._kube.get("Pod", *key_of(pod))
                if newest is not None and uid_of(newest) == uid:
                    self._pods.put(newest)
                    if labels.label_of(newest, labels.READY):
                        self._taken.pop(uid, None)
                continue
            except KubeError:
                # Whether the patch has arrived is not known. The watch will show it.
                self._taken.pop(uid, None)
                raise
            if taken is not None:
                self._pods.put(taken)
                self._failures.pop(job.metadata.namespace, None)
                return taken
        return None

    async def offer(self, pod: Object) -> None:
        """Offer a pod's job to the ready worker in it, unless that was answered before.

        If the control plane refuses the offer, the pod is of no use and is deleted.

        Raises:
            RollyardError: The control plane does not answer. The next pass offers again.
            KubeError: The API server does not answer.
        """
        uid = uid_of(pod)
        if uid in self._offered:
            return
        trouble = ""
        try:
            offer = offer_of(pod)
            if offer is None:
                return
            await self._client.offer(offer)
        except ValueError as error:
            trouble = str(error)
        except RollyardError as error:
            if error.status is None or error.status >= 500 or error.status == 429:
                raise
            if error.reason not in JOB_OVER:
                trouble = str(error)
        if trouble:
            self._refused_until = asyncio.get_running_loop().time() + REFUSED_SECONDS
            _log.warning("%s is not assigned: %s", "/".join(key_of(pod)), trouble)
            await self._kube.delete("Pod", *key_of(pod), grace=1, uid=uid)
        _remember(self._offered, uid)


def _remember(uids: dict[str, None], uid: str) -> None:
    uids[uid] = None
    while len(uids) > REMEMBERED:
        uids.pop(next(iter(uids)))
