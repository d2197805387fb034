"""The network of the sandboxes of a namespace: the operator's NetworkPolicy, and what all of them permit.

Policies add up: what one of them permits, no other can forbid. A foreign policy can therefore open the
network of a sandbox towards an address that none of the operator's checks tries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import CLAIM, JOB, Object, label_of
from rollyard_operator.kube.object_cache import uid_of
from rollyard_operator.pods.sandboxes import warm_owner, warm_reference
from rollyard_operator.pods.workloads import network_policy
from rollyard_operator.sandboxes.planning import NOT_ISOLATED
from rollyard_operator.settings import OperatorSettings

_NAMES = 3
"""The number of policies that one message names."""
SEEN_SECONDS = 2.0
"""How long a list of policies is reused, in seconds. Sandboxes are made in bursts."""
FORBIDDEN = 403
AGAIN_SECONDS = 600.0
"""The policy and the owner are applied again after this many seconds, whatever happened in between."""
LOOK_SECONDS = 30.0
"""The time between two looks at the policies that apply to the sandboxes in use, in seconds."""
REMEMBERED = 4096
"""The number of jobs for which the operator remembers that an event has named what is not proven."""
Jobs = Callable[[str, str], Object | None]
"""A function that finds the object of a job by namespace and name."""
_log = logging.getLogger(__name__)


def egress_trouble(policies: Iterable[Object], labels: Mapping[str, str], denied: bool) -> str:
    """Return why the policies do not keep a pod from sending, or an empty string if they do.

    Args:
        policies: All NetworkPolicies of the pod's namespace.
        labels: The labels of the pod.
        denied: Whether one of the policies must deny sending. False means that policies of other kinds may do
            so.
    """
    about = [one for one in policies if _of_egress(one) and _selects(_spec(one).get("podSelector"), labels)]
    opening = sorted(one["metadata"]["name"] for one in about if _spec(one).get("egress"))
    if opening:
        shown = ", ".join(opening[:_NAMES]) + (", …" if len(opening) > _NAMES else "")
        return (
            f"NetworkPolicy {shown} permits sandboxes to send: policies add up; keep it from selecting pods "
            "with the label app.kubernetes.io/component=sandbox"
        )
    if denied and not about:
        return "no NetworkPolicy of this namespace keeps sandboxes from sending; it was deleted or changed"
    return ""


def _spec(policy: Object) -> Mapping[str, Any]:
    return policy.get("spec") or {}


def _of_egress(policy: Object) -> bool:
    types = _spec(policy).get("policyTypes")
    # A policy without types applies to egress if it has egress rules.
    return "Egress" in types if types else bool(_spec(policy).get("egress"))


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects a pod. For safety, an unknown operator counts as a match."""
    selector = selector or {}
    required = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in required.items()):
        return False
    return all(_matches(one, labels) for one in selector.get("matchExpressions") or ())


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression.get("key"), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return key in labels and labels[str(key)] in values
        case "NotIn":
            return key not in labels or labels[str(key)] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return True


class Namespaces:
    """Applies the network policy and the owner of warm pods regularly. All methods raise KubeError."""

    def __init__(self, kube: KubeClient, settings: OperatorSettings) -> None:
        self._kube = kube
        self._settings = settings
        self._applied: dict[tuple[str, str], tuple[float, Object]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._policies: dict[str, tuple[float, list[Object]]] = {}
        self._warned: set[str] = set()

    async def close(self, namespace: str) -> None:
        """Make sure that the network policy for sandboxes exists, if that is left to the operator."""
        if self._settings.network_policies:
            await self._ensure("NetworkPolicy", namespace, network_policy)

    async def open_to(self, namespace: str, pod: Mapping[str, str]) -> str:
        """Return why the policies do not keep a sandbox with these labels from sending.

        An empty string means that they do, or that the settings do not ask for it.
        """
        isolation = self._settings.isolation
        if not isolation.required or isolation.policies == "ignore":
            return ""
        policies = await self._listed(namespace)
        return "" if policies is None else egress_trouble(policies, pod, self._settings.network_policies)

    async def _listed(self, namespace: str) -> list[Object] | None:
        """Return the policies of the namespace, or None if the operator has no right to list them."""
        async with self._locks.setdefault(("policies", namespace), asyncio.Lock()):
            known, now = self._policies.get(namespace), asyncio.get_running_loop().time()
            if known is not None and now - known[0] < SEEN_SECONDS:
                return known[1]
            try:
                policies = await self._kube.list("NetworkPolicy", namespace)
            except KubeError as error:
                if error.status != FORBIDDEN:
                    raise
                if namespace not in self._warned:
                    self._warned.add(namespace)
                    _log.warning("policies that open sandboxes are not noticed in %s: %s", namespace, error)
                return None
            self._policies[namespace] = (now, policies)
            return policies

    async def warm_reference(self, namespace: str) -> Object:
        """Return the owner reference for the warm pods of the namespace."""
        owner = await self._ensure("ConfigMap", namespace, warm_owner)
        return warm_reference(owner["metadata"]["name"], uid_of(owner))

    def forget(self, namespace: str) -> None:
        """Forget what was applied to the namespace. This is called when something was found missing there."""
        self._applied = {key: one for key, one in self._applied.items() if key[1] != namespace}
        self._policies.pop(namespace, None)

    async def _ensure(
        self, kind: str, namespace: str, build: Callable[[str, OperatorSettings], Object]
    ) -> Object:
        key = kind, namespace
        async with self._locks.setdefault(key, asyncio.Lock()):
            known, now = self._applied.get(key), asyncio.get_running_loop().time()
            if known is not None and now - known[0] < AGAIN_SECONDS:
                return known[1]
            made = await self._kube.apply(build(namespace, self._settings))
            self._applied[key] = (now, made)
            return made


class Guard:
    """Checks the policies of a namespace before a sandbox is made there and before it is handed out.

    Args:
        doubt: Returns what the checks inside the sandboxes do not prove, or an empty string if they prove
            everything.
    """

    def __init__(self, kube: KubeClient, namespaces: Namespaces, doubt: Callable[[], str]) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._doubt = doubt
        self._reported: dict[str, None] = {}
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

    async def report_doubt(self, job: Object | None) -> None:
        """Create one event for a job if the isolation of its sandboxes is only partly proven."""
        doubt = self._doubt()
        if job is None or not doubt or uid_of(job) in self._reported:
            return
        self._reported[uid_of(job)] = None
        while len(self._reported) > REMEMBERED:
            self._reported.pop(next(iter(self._reported)))
        await self._kube.event(job, "Normal", "IsolationPartlyProven", doubt)
