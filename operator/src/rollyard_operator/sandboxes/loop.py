"""The loop of sandbox pods: it compares claims from the control plane with pods in the cluster, pass by pass.

Everything that the loop remembers can be read again from these two sources. It can therefore be killed
between any two steps: the labels of a pod say which claim owns it, and its secret is derived from a nonce in
its annotations.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from rollyard_client import DriverClient, NotFound, RollyardError
from rollyard_crds.claims import Claim, ClaimList, ClaimStatus, SandboxShape, WarmWant
from rollyard_drivers.loop.driver import run_passes
from rollyard_drivers.reconcile.workloads import earliest
from rollyard_process.backoff import Backoff
from rollyard_process.token_bucket import TokenBucket

from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache, uid_of
from rollyard_operator.pods.observed_sandbox import Trouble
from rollyard_operator.pods.sandboxes import (
    SandboxOwner,
    claim_labels,
    flavor_of,
    job_reference,
    owner_of_object,
    sandbox_pod,
    secret_of,
    token_hash,
)
from rollyard_operator.sandboxes.observations import PortProbes, SandboxObservations
from rollyard_operator.sandboxes.planning import (
    NOT_ISOLATED,
    BindSandbox,
    DeleteSandbox,
    Doubts,
    FailSandbox,
    LaunchSandbox,
    ObservedSandboxes,
    Refusals,
    SandboxLimits,
    SandboxPlan,
    TakeSandbox,
    WantedSandbox,
    WarmNeed,
    WarmNumbers,
    doubts_of,
    reconcile_sandboxes,
    without,
)
from rollyard_operator.sandboxes.policies import Guard, Namespaces
from rollyard_operator.settings import OperatorSettings

POLL_SECONDS = 30.0
"""The longest time that one long poll waits for a change of claims, in seconds."""
AT_ONCE = 16
"""The number of simultaneous calls to the API server and the control plane."""
OWNER_SECONDS = 1.0
"""The time between two lookups of a job's object that claims need and that does not exist yet, in seconds."""
EVENT_PAUSE_SECONDS = 300.0
"""The minimum time between two events with the same reason for the same job, in seconds."""
_PAUSES: Final = Backoff(first=0.5, longest=10.0)
_log = logging.getLogger(__name__)


class Claims:
    """The claims and the warm wants as the control plane listed them last.

    Args:
        serves: Returns whether this operator looks after a namespace.
        changed: Called when the claims have changed.
    """

    def __init__(
        self,
        control: DriverClient,
        serves: Callable[[str], bool],
        now: Callable[[], datetime],
        changed: Callable[[], object],
    ) -> None:
        self._control = control
        self._serves = serves
        self._now = now
        self._changed = changed
        self._claims: dict[str, Claim] = {}
        self._revision: int | None = None
        self._listed_at = now()
        self.warm: list[WarmWant] = []

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    @property
    def listed(self) -> bool:
        """Whether the control plane has listed its claims at least once."""
        return self._revision is not None

    @property
    def ids(self) -> Set[str]:
        """The ids of all claims."""
        return self._claims.keys()

    def get(self, claim: str) -> Claim | None:
        """Return the claim with this id, or None if there is none."""
        return self._claims.get(claim)

    def age(self, claim: Claim, now: datetime) -> float:
        """Return how long the claim has existed, in seconds."""
        return claim.age_seconds + (now - self._listed_at).total_seconds()

    async def listen(self) -> None:
        """Follow the claims until cancelled."""
        failures = 0
        while True:
            try:
                self.learn(await self._control.claims(self._revision, POLL_SECONDS))
                failures = 0
            except RollyardError as error:
                _log.warning("claims cannot be read: %s", error)
                failures += 1
                await asyncio.sleep(_PAUSES.pause(failures))

    async def look(self) -> None:
        """Read the claims now, or raise RollyardError."""
        self.learn(await self._control.claims())

    def learn(self, listed: ClaimList) -> None:
        """Store the claims and the warm wants that the control plane listed."""
        self._claims = {claim.id: claim for claim in listed.claims if self._serves(claim.namespace)}
        self.warm = [want for want in listed.warm if self._serves(want.namespace)]
        self._revision, self._listed_at = listed.revision, self._now()
        self._changed()

    async def report(self, claim: str, status: ClaimStatus) -> None:
        """Report the state of a claim, and store the answer, or raise RollyardError."""
        try:
            now = await self._control.put_claim_status(claim, status)
        except NotFound:
            now = None
        if now is None:
            self._claims.pop(claim, None)
        elif claim in self._claims:
            # A list that is on its way may be older than this answer. In that case the same step is planned
            # again.
            self._claims[claim] = now
        self._changed()


class JobEvents:
    """Creates events about jobs, at most one per job and reason in EVENT_PAUSE_SECONDS.

    Args:
        jobs: Returns the RolloutJob object for a namespace and a name, as it is in the cluster.
    """

    def __init__(self, kube: KubeClient, jobs: Callable[[str, str], Object | None]) -> None:
        self._kube = kube
        self._jobs = jobs
        self._created: dict[tuple[str, str], float] = {}

    async def warn(self, namespace: str, job: str, reason: str, message: str) -> None:
        """Create an event `SandboxFailed` for the job. Raises KubeError."""
        obj = self._jobs(namespace, job)
        if obj is None:
            return
        key, now = (uid_of(obj), reason), asyncio.get_running_loop().time()
        if now - self._created.get(key, -EVENT_PAUSE_SECONDS) < EVENT_PAUSE_SECONDS:
            return
        self._created = {one: at for one, at in self._created.items() if now - at < EVENT_PAUSE_SECONDS}
        self._created[key] = now
        await self._kube.event(obj, "Warning", "SandboxFailed", f"{reason}: {message}"[:1024])


class SandboxLoop:
    """Keep the sandbox pods of one installation in line with the claims and the warm wants.

    Args:
        pods: The cache of all pods of this installation. It must have been filled once before `run`.
        jobs: Returns the RolloutJob object for a namespace and a name, as it is in the cluster.
        key: A key that only operators of this installation know. The secrets of sandboxes are derived from
            it.
        checks: The addresses that sandboxes must not reach, each as `ADDRESS:PORT`.
        doubt: Returns what these checks do not prove, or an empty string if they prove everything.
    """

    def __init__(
        self,
        kube: KubeClient,
        pods: PodCache,
        control: DriverClient,
        jobs: Callable[[str, str], Object | None],
        settings: OperatorSettings,
        key: str,
        checks: Sequence[str],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        doubt: Callable[[], str] = lambda: "",
    ) -> None:
        self._kube = kube
        self._pods = pods
        self._jobs = jobs
        self._settings = settings
        self._key = key
        self._checks = tuple(checks)
        self._now = now
        creation = settings.sandbox_creation
        self._bucket = TokenBucket(creation.per_second, creation.burst)
        self._limits = SandboxLimits(
            per_second=creation.per_second,
            unschedulable_seconds=settings.unschedulable_seconds,
            pull_seconds=settings.image_pull_seconds,
        )
        self._wake = asyncio.Event()
        pods.listen(lambda pod: self.wake())
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._refusals = Refusals()
        self._numbers = WarmNumbers()
        self._recipes: dict[tuple[str, str], tuple[SandboxShape, SandboxOwner]] = {}
        """How to make a pod of each flavor of a namespace."""
        self._namespaces = Namespaces(kube, settings)
        self._guard = Guard(kube, self._namespaces, doubt)
        self._probes = PortProbes(self.wake)
        self.claims = Claims(control, settings.looks_after, now, self.wake)
        # A pod that is not isolated may lack its policy, which is applied again before the next pod is made.
        self._observations = SandboxObservations(pods, self._probes, key, self._namespaces.forget)
        self._events = JobEvents(kube, jobs)
        self._failures = 0

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.claims.listen(), name="claims")
            group.create_task(run_passes(self.run_pass, self._wake, POLL_SECONDS), name="sandboxes")
            group.create_task(self._probes.run(), name="ports of sandboxes")
            policies = self._guard.run(lambda: self._pods.pods(component="sandbox"), self._jobs)
            group.create_task(policies, name="policies over sandboxes")

    def wake(self) -> None:
        """Start another pass. This is called when the object of a job appeared or changed."""
        self._wake.set()

    # One pass

    def plan(self) -> SandboxPlan:
        """Return what has to be done now. The plan is empty before the first list of claims."""
        if not self.claims.listed:
            return SandboxPlan()
        now = self._now()
        claims, needs = self._wanted(now)
        limits = replace(self._limits, tokens=self._bucket.tokens(asyncio.get_running_loop().time()))
        pods = self._observations.look()
        observed = ObservedSandboxes(pods, self._refusals.current(now), self._numbers.see(pods))
        return reconcile_sandboxes(claims, needs, observed, now, limits)

    async def run_pass(self) -> float | None:
        """Make a plan and carry it out.

        Returns:
            The number of seconds until the next pass, if no change starts one earlier.
        """
        plan = await self._sure(self.plan())
        taking = {take.claim: take for take in plan.take}
        binding = {bind.claim: bind for bind in plan.bind}
        # A step becomes a coroutine only when it runs. An operator that is stopped in between thus leaves no
        # coroutine that was never awaited.
        steps: list[Callable[[], Awaitable[None]]] = [
            partial(self._take, take, binding.get(claim)) for claim, take in taking.items()
        ]
        steps += [partial(self._bind, bind) for claim, bind in binding.items() if claim not in taking]
        steps += [partial(self._launch, launch) for launch in plan.launch]
        steps += [partial(self._fail, fail) for fail in plan.fail]
        removed = ClaimStatus(state="Removed")
        steps += [partial(self.claims.report, claim, removed) for claim in plan.remove]
        steps += [partial(self._delete, delete) for delete in plan.delete]
        fine = await asyncio.gather(*(self._step(step) for step in steps))
        self._failures = 0 if all(fine) else self._failures + 1
        waits = [plan.requeue_after, _PAUSES.pause(self._failures) if self._failures else None]
        if any(claim.state == "Pending" and self._owner(claim) is None for claim in self.claims):
            waits.append(OWNER_SECONDS)
        return earliest(waits)

    async def _sure(self, plan: SandboxPlan) -> SandboxPlan:
        """Return the plan after a second look, because an outdated view must not destroy a pod."""
        doubts = self._doubts(plan)
        if not doubts:
            return plan
        try:
            await self.claims.look()
            for claim in [one for one in self.claims if one.id in doubts.lost]:
                mine = f"{labels.selector(self._settings.instance)},{labels.CLAIM}={claim.id}"
                for pod in await self._kube.list("Pod", claim.namespace, mine):
                    self._pods.put(pod)
        except (KubeError, RollyardError) as error:
            _log.warning("sandboxes: cannot look again: %s: %s", type(error).__name__, error)
            return without(plan, doubts)
        plan = self.plan()
        return without(plan, self._doubts(plan) - doubts)

    def _doubts(self, plan: SandboxPlan) -> Doubts:
        return doubts_of(plan, self.claims.ids, self._observations.last)

    async def _step(self, step: Callable[[], Awaitable[None]]) -> bool:
        """Return whether the step succeeded. A step that failed is planned again in the next pass."""
        async with self._at_once:
            try:
                await step()
            except (KubeError, RollyardError) as error:
                _log.warning("sandboxes: %s: %s", type(error).__name__, error)
                return False
            return True

    def _wanted(self, now: datetime) -> tuple[list[WantedSandbox], list[WarmNeed]]:
        """Return claims and warm wants with their flavors, and remember how to make a pod of each flavor."""
        self._recipes = {}
        claims = [
            WantedSandbox(
                claim.id,
                claim.namespace,
                claim.state,
                self.claims.age(claim, now),
                self._flavor(claim) if claim.state == "Pending" else "",
                claim.address,
            )
            for claim in self.claims
        ]
        flavors = [(want, self._flavor(want)) for want in self.claims.warm]
        return claims, [WarmNeed(want.namespace, flavor, want.count) for want, flavor in flavors if flavor]

    def _flavor(self, wish: Claim | WarmWant) -> str:
        owner = self._owner(wish)
        if owner is None:
            return ""
        flavor = flavor_of(wish.shape, owner, self._settings)
        self._recipes.setdefault((wish.namespace, flavor), (wish.shape, owner))
        return flavor

    def _owner(self, wish: Claim | WarmWant | None) -> SandboxOwner | None:
        """Return the object of the job, or None if it does not exist or is being deleted."""
        obj = self._jobs(wish.namespace, wish.job) if wish is not None else None
        return owner_of_object(obj, self._settings) if obj is not None else None

    # Steps

    async def _launch(self, launch: LaunchSandbox) -> None:
        key = launch.namespace, launch.name
        shape, flavor_owner = self._recipes[launch.namespace, launch.flavor]
        # The pod belongs to the job of its claim, not to the first job of that flavor.
        owner = self._owner(self.claims.get(launch.claim)) if launch.claim else flavor_owner
        if owner is None:
            return
        self._bucket.take(asyncio.get_running_loop().time())
        try:
            if launch.claim:
                reference = job_reference(owner)
            else:
                reference = await self._namespaces.warm_reference(launch.namespace)
            nonce = secrets.token_hex(8)
            pod = sandbox_pod(
                launch.name,
                shape,
                owner,
                self._settings,
                nonce=nonce,
                token_sha256=token_hash(secret_of(self._key, *key, nonce)),
                reference=reference,
                claim=launch.claim,
                checks=self._checks,
            )
            await self._guard.close(launch.namespace, pod["metadata"]["labels"])
            self._pods.put(await self._kube.create(pod))
            self._refusals.clear(key)
            await self._guard.report_doubt(self._jobs(launch.namespace, owner.name))
        except KubeConflict as error:
            self._bucket.give_back()
            await self._look(key, error)
        except KubeError as error:
            self._bucket.give_back()
            if error.status == 404:  # The owner or the namespace was deleted in the meantime.
                self._namespaces.forget(launch.namespace)
            trouble = self._refused(key, error)
            _log.warning("%s/%s cannot be made: %s: %s", *key, trouble.reason, trouble.message)
            # There is no pod that could show the error, and a claim may wait for minutes until it fails.
            await self._events.warn(launch.namespace, owner.name, trouble.reason, trouble.message)

    async def _look(self, key: tuple[str, str], error: KubeError) -> None:
        """Look at the pod that has the name: one that the watch has not reported yet, or a foreign one."""
        there = await self._kube.get("Pod", *key)
        if there is None:
            raise error  # The pod is gone again, or the conflict is not about names. The next pass retries.
        if labels.label_of(there, labels.INSTANCE) == self._settings.instance:
            self._pods.put(there)
        else:
            taken = KubeError(409, "AlreadyExists", f"the pod {key[1]!r} exists and belongs to another owner")
            self._refused(key, taken)

    def _refused(self, key: tuple[str, str], error: KubeError) -> Trouble:
        self._wake.set()  # The next pass plans the time of the next try.
        return self._refusals.add(key, error, self._now())

    async def _take(self, take: TakeSandbox, bind: BindSandbox | None) -> None:
        owner = self._owner(self.claims.get(take.claim))
        if owner is None:
            return
        pod = take.pod
        there = self._pods.get((pod.namespace, pod.name))
        if there is None or uid_of(there) != pod.uid or labels.label_of(there, labels.CLAIM):
            return  # The pod was taken after the plan was made.
        body = {
            "metadata": {
                "labels": claim_labels(take.claim, owner),
                "ownerReferences": [job_reference(owner)],
            }
        }
        try:
            # The patch requires the version that was seen, because another operator may take the pod for
            # another claim.
            version = str(there["metadata"]["resourceVersion"])
            taken = await self._kube.patch("Pod", pod.namespace, pod.name, body, uid=pod.uid, version=version)
        except KubeConflict:
            if (newer := await self._kube.get("Pod", pod.namespace, pod.name)) is not None:
                self._pods.put(newer)
            self._wake.set()
            return
        if taken is None:
            self._pods.remove((pod.namespace, pod.name), pod.uid)
            return
        self._pods.put(taken)
        seen = self._observations.read(taken)
        if bind is not None and seen.state == "ready":
            await self._bind(BindSandbox(take.claim, seen))

    async def _bind(self, bind: BindSandbox) -> None:
        pod = self._pods.get((bind.pod.namespace, bind.pod.name))
        if pod is None or uid_of(pod) != bind.pod.uid:
            return
        if await self._was_opened(bind, pod):
            return
        status = ClaimStatus(state="Bound", address=bind.pod.address, secret=self._observations.secret(pod))
        await self.claims.report(bind.claim, status)

    async def _was_opened(self, bind: BindSandbox, pod: Object) -> bool:
        """Return whether policies have opened the sandbox since it started. Such a sandbox is deleted."""
        opened = await self._guard.opened(pod)
        if opened:
            namespace, name = bind.pod.namespace, bind.pod.name
            _log.warning("%s/%s is not handed out: %s", namespace, name, opened)
            if (claim := self.claims.get(bind.claim)) is not None:
                await self._events.warn(namespace, claim.job, NOT_ISOLATED, opened)
            await self._delete(DeleteSandbox(namespace, name, bind.pod.uid))
            self._wake.set()
        return bool(opened)

    async def _fail(self, fail: FailSandbox) -> None:
        trouble, claim = fail.trouble, self.claims.get(fail.claim)
        if claim is None:
            return
        status = ClaimStatus(
            state="Failed",
            reason=trouble.reason[:128],
            message=trouble.message[:1024],
            retryable=trouble.retryable,
        )
        await self.claims.report(fail.claim, status)
        await self._events.warn(claim.namespace, claim.job, trouble.reason, trouble.message)

    async def _delete(self, delete: DeleteSandbox) -> None:
        grace = 0 if delete.force else self._settings.sandbox.termination_grace_seconds
        await self._kube.delete("Pod", delete.namespace, delete.name, grace=grace, uid=delete.uid)
        if delete.force:
            self._pods.remove((delete.namespace, delete.name), delete.uid)
        else:
            self._observations.deleted(delete.uid, self._now() + timedelta(seconds=grace))
