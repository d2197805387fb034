"""The loop of sandbox pods over a cluster and a control plane in memory, with everything going wrong."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rollyard_client import RollyardError
from rollyard_crds.claims import ClaimList, ClaimStatus, SandboxShape
from rollyard_operator.kube import labels
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.object_cache import PodCache, key_of, uid_of
from rollyard_operator.sandboxes.guard import Guard
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.sandboxes.namespaces import Namespaces
from rollyard_operator.sandboxes.witnesses import Witnesses
from rollyard_operator.settings import OperatorSettings, parse_settings
from rollyard_testing.operator.fakeclaims import SHAPE, ClaimDesk
from rollyard_testing.operator.fakecluster import FakeKube
from rollyard_testing.operator.operatorlab import PATIENCE_SECONDS

SETTINGS = parse_settings(
    """
    instance: test
    controlPlaneUrl: http://api:8765
    tokenFile: /t
    workerTokenFile: /w
    releaseNamespace: rollyard
    apiServerVersion: "1.36"
    images: {worker: w:1, engine: e:1, sandbox: s:1, sandboxDefault: d:1}
    allow: {runtimeClasses: [gvisor]}
    """
)


class World:
    """One namespace with a job, the kubelet's part, and an operator that may be replaced."""

    def __init__(self, settings: OperatorSettings = SETTINGS) -> None:
        self.settings = settings
        self.now = datetime.now(UTC)
        self.kube, self.plane = FakeKube(), ClaimDesk(lambda: self.now)
        self.started = 0
        self.deaf = False
        """If true, the watch is lost and reports nothing."""
        self.pods = PodCache()
        self.kube.watchers.append(self._told)
        self.add_job("job")
        self.loop = self.operator()

    def add_job(self, name: str, namespace: str = "team", **spec: Any) -> None:
        self.kube.put(
            {
                "apiVersion": "rollyard.dev/v1alpha1",
                "kind": "RolloutJob",
                "metadata": {"name": name, "namespace": namespace, "labels": {labels.QUEUE: "queue"}},
                "spec": {"sandbox": spec},
            }
        )

    def operator(self, key: str = "driver token") -> SandboxLoop:
        """Return a new process, which knows only what the cluster and the control plane say."""
        self.pods = PodCache()
        self.resync()
        return SandboxLoop(
            self.kube,
            self.pods,
            self.plane,
            lambda namespace, name: self.kube.objects.get(("RolloutJob", namespace, name)),
            self.settings,
            key,
            ("10.0.0.1:443",),
            now=lambda: self.now,
        )

    def _told(self, verb: str, obj: Any) -> None:
        if self.deaf or obj["kind"] != "Pod":
            return
        if verb == "DELETED":
            self.pods.remove(key_of(obj), uid_of(obj))
        else:
            self.pods.put(obj)

    def resync(self) -> None:
        """Do what a new watch begins with."""
        there = {uid_of(pod) for pod in self.kube.of("Pod")}
        for pod in self.pods:
            if uid_of(pod) not in there:
                self.pods.remove(key_of(pod), uid_of(pod))
        for pod in self.kube.of("Pod"):
            self.pods.put(pod)

    async def turn(self, times: int = 1) -> float | None:
        after = None
        for _ in range(times):
            with contextlib.suppress(RollyardError):
                self.loop.claims.learn(await self.plane.claims())
            after = await self.loop.run_pass()
        return after

    # The kubelet.

    def start(self, name: str | None = None) -> None:
        """Let pods that were made get an address and take connections."""
        for pod in self.kube.of("Pod"):
            if name not in (None, pod["metadata"]["name"]) or pod["metadata"].get("deletionTimestamp"):
                continue
            if "status" not in pod:
                self.started += 1
                self.status(pod, **running(f"10.1.{self.started // 250}.{self.started % 250}"))

    def status(self, pod: Any, **status: Any) -> None:
        self.kube.pod_status(*key_of(pod), status)

    def reap(self) -> None:
        """Let pods that are being deleted go."""
        for pod in self.kube.of("Pod"):
            if pod["metadata"].get("deletionTimestamp"):
                self.kube.remove("Pod", *key_of(pod))

    def pod(self, name: str) -> Any:
        return self.kube.objects["Pod", "team", name]

    def state(self, claim: str) -> str:
        return self.plane.claims_[claim].state


def running(ip: str) -> dict[str, Any]:
    return {
        "phase": "Running",
        "podIP": ip,
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "sandbox", "state": {"running": {}}}],
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"name": "sandbox", "state": state}]}


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_claim_gets_a_pod_of_its_own_and_gives_it_back(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    pod = world.pod(f"sb-{claim}")
    owner = world.kube.objects["RolloutJob", "team", "job"]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [uid_of(owner)]
    assert pod["metadata"]["labels"][labels.CLAIM] == claim
    assert pod["metadata"]["labels"][labels.QUEUE] == "queue"
    assert world.state(claim) == "Pending", "it takes no connections yet"
    world.start()
    await world.turn()
    bound = world.plane.claims_[claim]
    assert (bound.state, bound.address) == ("Bound", "tcp://10.1.0.1:7411")
    args = pod["spec"]["containers"][0]["args"]
    known = args[args.index("--token-sha256") + 1]
    assert known == hashlib.sha256(bound.secret.encode()).hexdigest()
    assert bound.secret not in str(pod), "the secret itself stands nowhere in the cluster"
    assert args[args.index("--isolation-check") + 1] == "10.0.0.1:443"
    world.plane.release(claim)
    await world.turn()
    assert world.pod(f"sb-{claim}")["metadata"]["deletionTimestamp"]
    assert claim in world.plane.claims_, "not before the pod is gone"
    world.reap()
    await world.turn()
    assert (world.plane.claims_, world.kube.of("Pod")) == ({}, [])


async def test_a_pod_that_answers_is_handed_out_before_the_kubelet_has_looked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = world.plane.file()
    await world.turn()
    tried: list[tuple[str, int]] = []
    listens = asyncio.Event()

    async def connect(host: str, port: int) -> None:
        tried.append((host, port))
        await listens.wait()

    monkeypatch.setattr(world.loop._probes, "_connect", connect)
    working = asyncio.create_task(world.loop._probes.run())
    status = running("10.1.0.9")
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    world.status(world.pod(f"sb-{claim}"), **status)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not tried:
            await world.turn()
            await asyncio.sleep(0)
    await world.turn()
    assert (world.state(claim), tried) == ("Pending", [("10.1.0.9", 7411)])
    listens.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while world.state(claim) == "Pending":
            await world.turn()
            await asyncio.sleep(0.01)
    bound = world.plane.claims_[claim]
    assert (bound.state, bound.address) == ("Bound", "tcp://10.1.0.9:7411")
    # It keeps its owner also after a restart, when nothing of it is remembered.
    world.loop = world.operator()
    await world.turn(3)
    assert world.state(claim) == "Bound"
    assert f"sb-{claim}" in world.kube.names("Pod")
    working.cancel()


async def test_the_network_is_closed_before_the_first_sandbox(world: World) -> None:
    world.plane.file()
    await world.turn()
    order = [(verb, kind) for verb, kind, _ in world.kube.calls if verb in ("apply", "create")]
    assert order == [("apply", "NetworkPolicy"), ("create", "Pod")]
    world.plane.file()
    await world.turn()
    verbs = [verb for verb, kind, _ in world.kube.calls if kind == "NetworkPolicy"]
    assert (verbs.count("apply"), verbs.count("list")) == (1, 1), "once in a while"


def opening(**spec: Any) -> dict[str, Any]:
    """Return a policy of somebody else."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "mine", "namespace": "team"},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]} | spec,
    }


async def test_a_policy_that_opens_sandboxes_keeps_them_from_being_made(world: World) -> None:
    world.kube.put(opening(egress=[{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]))
    claim = world.plane.file()
    await world.turn(2)
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", "NotIsolated", True)
    assert "NetworkPolicy mine permits sandboxes to send" in failed.message
    assert world.kube.of("Pod") == []
    assert ("RolloutJob/job", "Warning", "SandboxFailed") in [one[:3] for one in world.kube.events]


async def test_a_warm_sandbox_that_was_opened_meanwhile_is_not_handed_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_operator.sandboxes.namespaces.SEEN_SECONDS", 0.0)
    world.plane.want(1)
    await world.turn()
    world.start()
    (warm,) = world.kube.names("Pod")
    world.kube.put(opening())
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) != "Bound"
    assert "deletionTimestamp" in world.pod(warm)["metadata"]
    world.reap()
    world.kube.remove("NetworkPolicy", "team", "mine")
    later = world.plane.file()
    world.now += timedelta(seconds=120)
    await world.turn(2)
    world.start()
    await world.turn(2)
    assert world.state(later) == "Bound", "with a proper policy it is"


async def test_a_job_is_told_once_when_its_sandboxes_in_use_are_opened(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn(2)
    assert world.state(claim) == "Bound"

    async def looked() -> list[str]:
        """Return messages of the events after one more check, which knows nothing of policies so far."""
        guard._namespaces.forget("team")
        await guard.look(world.kube.of("Pod"), lambda *key: world.kube.objects.get(("RolloutJob", *key)))
        return [message for _, _, reason, message in world.kube.events if reason == "SandboxesOpened"]

    guard = Guard(world.kube, Namespaces(world.kube, SETTINGS), lambda: "")
    assert await looked() == []
    world.kube.put(opening())
    (told,) = await looked()
    assert "NetworkPolicy mine permits" in told
    assert len(await looked()) == 1
    world.kube.remove("NetworkPolicy", "team", "mine")
    assert len(await looked()) == 1
    world.kube.put(opening())
    assert len(await looked()) == 2, "opened once more"
    assert world.state(claim) == "Bound"


async def test_our_own_policy_is_put_back_before_a_sandbox_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_operator.sandboxes.namespaces.SEEN_SECONDS", 0.0)
    world.plane.file()
    await world.turn()
    world.kube.remove("NetworkPolicy", "team", "rollyard-test-sandboxes")
    world.plane.file()
    await world.turn()
    assert world.kube.names("NetworkPolicy") == ["rollyard-test-sandboxes"]
    assert len(world.kube.of("Pod")) == 2


async def test_where_policies_cannot_be_listed_the_sandboxes_own_checks_decide(world: World) -> None:
    forbidden = KubeError(403, "Forbidden", "networkpolicies is forbidden")
    world.kube.refuse = lambda verb, obj: (
        forbidden if (verb, obj["kind"]) == ("list", "NetworkPolicy") else None
    )
    world.plane.file()
    await world.turn()
    assert len(world.kube.of("Pod")) == 1


async def test_a_job_is_told_once_what_is_not_proven(world: World) -> None:
    world.loop = SandboxLoop(
        world.kube,
        world.pods,
        world.plane,
        lambda namespace, name: world.kube.objects.get(("RolloutJob", namespace, name)),
        SETTINGS,
        "driver token",
        (),
        now=lambda: world.now,
        doubt=Witnesses(()).doubt,
    )
    for _ in range(2):
        world.plane.file()
        await world.turn()
    told = [one for one in world.kube.events if one[2] == "IsolationPartlyProven"]
    assert [(name, kind) for name, kind, _, _ in told] == [("RolloutJob/job", "Normal")]
    assert "sandboxes.isolation.external" in told[0][3]


async def test_without_its_network_policy_no_sandbox_is_made(world: World) -> None:
    forbidden = KubeError(403, "Forbidden", "networkpolicies is forbidden")
    world.kube.refuse = lambda verb, obj: forbidden if obj["kind"] == "NetworkPolicy" else None
    claim = world.plane.file()
    await world.turn(2)
    assert world.kube.of("Pod") == []
    assert world.plane.claims_[claim].reason == "PodRefused"


async def test_warm_pods_are_made_taken_and_refilled(world: World) -> None:
    world.plane.want(2)
    await world.turn()
    assert len(world.kube.of("Pod")) == 2
    config = world.kube.objects["ConfigMap", "team", "rollyard-test-warm"]
    for pod in world.kube.of("Pod"):
        assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [uid_of(config)]
        assert pod["metadata"]["labels"][labels.WARM] == "true"
    world.start()
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) == "Bound", "in the same turn"
    (taken,) = [pod for pod in world.kube.of("Pod") if pod["metadata"]["labels"].get(labels.CLAIM) == claim]
    job = world.kube.objects["RolloutJob", "team", "job"]
    assert [one["uid"] for one in taken["metadata"]["ownerReferences"]] == [uid_of(job)], "re-owned"
    assert labels.WARM not in taken["metadata"]["labels"]
    assert len(world.kube.of("Pod")) == 3, "refilled"
    assert f"sb-{claim}" not in world.kube.names("Pod")
    world.plane.want(0)
    await world.turn()
    world.reap()
    assert world.kube.of("Pod") == [world.pod(taken["metadata"]["name"])]


async def test_jobs_of_one_flavor_share_warm_pods_and_others_do_not(world: World) -> None:
    world.add_job("same")
    world.add_job("other", template={"runtimeClassName": "gvisor"})
    world.plane.want(1)
    await world.turn()
    world.start()
    other, same = world.plane.file(job="other"), world.plane.file(job="same")
    await world.turn()
    assert (world.state(other), world.state(same)) == ("Pending", "Bound")
    assert world.pod(f"sb-{other}")["spec"]["runtimeClassName"] == "gvisor"


async def test_an_operator_killed_between_taking_and_binding_goes_on(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    claim = world.plane.file()
    world.plane.fault = lambda: True
    world.loop.claims.learn(await _listed(world.plane))
    await world.loop.run_pass()
    (taken,) = [pod for pod in world.kube.of("Pod") if pod["metadata"]["labels"].get(labels.CLAIM) == claim]
    assert world.state(claim) == "Pending"
    world.plane.fault = lambda: False
    world.loop = world.operator()
    await world.turn()
    bound = world.plane.claims_[claim]
    assert bound.state == "Bound"
    assert hashlib.sha256(bound.secret.encode()).hexdigest() in taken["spec"]["containers"][0]["args"]


async def _listed(plane: ClaimDesk) -> ClaimList:
    fault, plane.fault = plane.fault, lambda: False
    listed = await plane.claims()
    plane.fault = fault
    return listed


async def test_with_another_key_pods_whose_secret_is_lost_are_replaced(world: World) -> None:
    claim = world.plane.file()
    world.plane.want(1)
    await world.turn()
    before = {uid_of(pod) for pod in world.kube.of("Pod")}
    world.loop = world.operator(key="another")
    for _ in range(3):
        await world.turn()
        world.reap()
        world.start()
    await world.turn()
    assert not before & {uid_of(pod) for pod in world.kube.of("Pod")}
    assert world.state(claim) == "Bound"


async def test_a_pod_that_the_watch_did_not_tell_is_found_by_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = world.plane.file()
    world.deaf = True
    await world.turn()
    monkeypatch.setattr(world, "resync", lambda: None)  # The cache was filled before the pod was made.
    world.loop = world.operator()
    assert not len(world.pods)
    world.deaf = False
    await world.turn()
    assert len(world.kube.of("Pod")) == 1
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_a_name_that_is_somebody_elses_fails_the_claim(world: World) -> None:
    claim = world.plane.file()
    world.kube.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"sb-{claim}", "namespace": "team"},
            "spec": {"containers": [{"name": "a"}]},
        }
    )
    world.pods.remove(("team", f"sb-{claim}"), uid_of(world.pod(f"sb-{claim}")))
    await world.turn(3)
    assert world.plane.claims_[claim].reason == "PodRefused"
    assert "belongs to another owner" in world.plane.claims_[claim].message
    assert world.kube.of("Pod"), "it is not ours to delete"


async def test_a_warm_pod_that_is_gone_when_it_is_taken_costs_nothing(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (pod,) = world.kube.of("Pod")
    world.deaf = True
    world.kube.remove("Pod", *key_of(pod))
    world.deaf = False
    claim = world.plane.file()
    await world.turn(2)
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_a_warm_pod_of_the_same_name_but_another_uid_is_not_taken(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (old,) = world.kube.of("Pod")
    world.deaf = True
    world.kube.remove("Pod", *key_of(old))
    world.kube.put({**old, "metadata": {k: v for k, v in old["metadata"].items() if k != "uid"}})
    world.deaf = False
    claim = world.plane.file()
    await world.turn()
    new = world.pod(old["metadata"]["name"])
    assert uid_of(new) != uid_of(old)
    assert labels.CLAIM not in new["metadata"]["labels"]
    assert world.state(claim) == "Pending"


async def test_a_warm_pod_that_broke_unseen_is_not_handed_out(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (pod,) = world.kube.of("Pod")
    world.deaf = True
    world.status(pod, **ended(137, "OOMKilled"))
    world.deaf = False
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) == "Pending"
    assert not [status for _, status in world.plane.told if status.state == "Bound"]
    await world.turn(2)
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound", "to another pod"
    assert not labels.label_of(world.pod(key_of(pod)[1]), labels.CLAIM)


class Beside:
    """A second operator on the same cluster and control plane, which sees pods only when a test lets it."""

    def __init__(self, world: World) -> None:
        self.world, first, seen = world, world.loop, world.pods
        self.loop, self.pods = world.operator(), world.pods
        world.loop, world.pods = first, seen

    async def turn(self) -> None:
        await self.loop.run_pass()

    async def lists_claims(self) -> None:
        self.loop.claims.learn(await self.world.plane.claims())


async def test_a_warm_pod_is_taken_for_one_claim_by_two_operators(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    await world.turn()
    second = Beside(world)
    one = world.plane.file()
    await world.turn()
    (address,) = [claim.address for claim in world.plane.claims_.values() if claim.state == "Bound"]
    other = world.plane.file()
    await second.lists_claims()
    # It still sees the warm pod without an owner, and has a claim that wants one.
    assert [not labels.label_of(pod, labels.CLAIM) for pod in second.pods] == [True]
    await second.turn()
    assert labels.label_of(world.pod(key_of(next(iter(second.pods)))[1]), labels.CLAIM) == one
    await second.turn()
    assert (world.state(other), world.plane.claims_[one].address) == ("Pending", address)


async def test_an_operator_that_is_behind_with_pods_loses_no_sandbox(world: World) -> None:
    second = Beside(world)
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"
    await second.lists_claims()
    await second.turn()
    assert world.state(claim) == "Bound", "its pod was not seen yet"
    assert [key_of(pod)[1] for pod in second.pods] == [f"sb-{claim}"]
    # It is gone for good, for both.
    world.kube.remove("Pod", "team", f"sb-{claim}")
    second.pods.remove(("team", f"sb-{claim}"), uid_of(next(iter(second.pods))))
    await second.turn()
    assert (world.state(claim), world.plane.claims_[claim].reason) == ("Failed", "SandboxLost")


async def test_an_operator_that_is_behind_with_claims_deletes_no_sandbox(world: World) -> None:
    second = Beside(world)
    await second.lists_claims()
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    for pod in world.kube.of("Pod"):
        second.pods.put(pod)
    await second.turn()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]
    # While the control plane is away, its owner is unknown.
    world.plane.claims_.clear()
    world.plane.fault = lambda: True
    third = Beside(world)
    await third.turn()
    third.loop.claims.learn(ClaimList(revision=9, claims=[], warm=[]))
    await third.turn()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]
    world.plane.fault = lambda: False
    await third.turn()
    assert "deletionTimestamp" in world.pod(f"sb-{claim}")["metadata"]


async def test_of_two_pods_of_a_claim_none_goes_before_one_is_bound(world: World) -> None:
    """Two operators have each found one; the other may be binding its own at this moment."""
    claim = world.plane.file()
    await world.turn()
    world.plane.want(1)
    await world.turn()
    world.plane.want(0)
    (warm,) = [name for name in world.kube.names("Pod") if name != f"sb-{claim}"]
    await world.kube.patch("Pod", "team", warm, {"metadata": {"labels": {labels.CLAIM: claim}}})
    await world.turn(2)
    assert [pod["metadata"].get("deletionTimestamp") for pod in world.kube.of("Pod")] == [None, None]
    world.start()
    await world.turn(2)
    assert world.state(claim) == "Bound"
    left = [pod for pod in world.kube.of("Pod") if "deletionTimestamp" not in pod["metadata"]]
    assert [pod["status"]["podIP"] in world.plane.claims_[claim].address for pod in left] == [True]


async def test_what_is_deleted_is_deleted_once(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.deaf = True
    world.plane.release(claim)
    await world.turn(5)
    assert [verb for verb, _, _ in world.kube.calls].count("delete") == 1
    world.reap()
    world.now += timedelta(seconds=120)
    await world.turn(2)
    assert world.plane.claims_ == {}, "nobody told that it is gone, and it was found out"


async def test_a_conflict_that_is_no_taken_name_is_tried_again_soon(world: World) -> None:
    conflict = KubeConflict(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q"')
    world.kube.refuse = lambda verb, obj: conflict if verb == "create" else None
    claim = world.plane.file()
    after = await world.turn()
    assert after is not None
    assert after <= 1.0
    world.kube.refuse = lambda verb, obj: None
    await world.turn()
    assert world.kube.names("Pod") == [f"sb-{claim}"]


async def test_quota_is_waited_for_and_told_in_the_end(world: World) -> None:
    quota = KubeError(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: team, requested: pods=1')
    world.kube.refuse = lambda verb, obj: quota if (verb, obj["kind"]) == ("create", "Pod") else None
    claim = world.plane.file()
    await world.turn()
    after = await world.turn()
    assert world.state(claim) == "Pending"
    assert after == pytest.approx(1.0)
    tries = sum(verb == "create" for verb, _, _ in world.kube.calls)
    await world.turn(5)
    assert sum(verb == "create" for verb, _, _ in world.kube.calls) == tries, "not before the pause is over"
    for _ in range(40):
        world.now += timedelta(seconds=8)
        await world.turn()
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", "QuotaExceeded", True)
    assert "exceeded quota: team" in failed.message
    assert [event[2] for event in world.kube.events] == ["SandboxFailed"]


async def test_quota_that_frees_up_is_used(world: World) -> None:
    quota = KubeError(403, "Forbidden", "exceeded quota: team")
    world.kube.refuse = lambda verb, obj: quota if (verb, obj["kind"]) == ("create", "Pod") else None
    claim = world.plane.file()
    await world.turn()
    world.kube.refuse = lambda verb, obj: None
    world.now += timedelta(seconds=2)
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


@pytest.mark.parametrize("status", [429, 503, 0])
async def test_a_busy_api_server_fails_no_claim(world: World, status: int) -> None:
    busy = KubeError(status, "TooManyRequests", "try again later", retry_after=5.0)
    world.kube.refuse = lambda verb, obj: busy
    claim = world.plane.file()
    await world.turn()
    assert await world.turn() == pytest.approx(5.0), "as long as it asked for"
    world.kube.refuse = lambda verb, obj: None
    world.now += timedelta(seconds=5)
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_what_the_api_server_will_never_take_fails_at_once(world: World) -> None:
    invalid = KubeError(422, "Invalid", 'Pod "x" is invalid: spec.tolerations[0].operator: Unsupported value')
    world.kube.refuse = lambda verb, obj: invalid if verb == "create" else None
    claim = world.plane.file()
    await world.turn(2)
    failed = world.plane.claims_[claim]
    assert (failed.reason, failed.retryable) == ("PodRefused", False)
    assert "spec.tolerations[0].operator" in failed.message


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (ended(137, "OOMKilled"), "OutOfMemory", True),
        (ended(78, message="NotIsolated: 10.0.0.1:443 answers"), "NotIsolated", True),
        (ended(128, "StartError", "exec: no such file"), "StartFailed", False),
        ({"phase": "Failed", "reason": "Evicted", "message": "ephemeral-storage"}, "Evicted", True),
    ],
)
@pytest.mark.parametrize("bound", [True, False])
async def test_a_pod_that_ends_fails_its_claim_with_its_own_reason(
    world: World, status: dict[str, Any], reason: str, retryable: bool, bound: bool
) -> None:
    claim = world.plane.file()
    await world.turn()
    if bound:
        world.start()
        await world.turn()
    world.status(world.pod(f"sb-{claim}"), **status)
    await world.turn()
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", reason, retryable)
    await world.turn()
    world.reap()
    await world.turn()
    assert world.kube.of("Pod") == []
    assert (claim, ClaimStatus(state="Removed")) in world.plane.told


async def test_a_sandbox_that_somebody_deleted_is_lost(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    await world.kube.delete("Pod", "team", f"sb-{claim}")
    await world.turn()
    assert world.plane.claims_[claim].reason == "SandboxLost"


async def test_a_pod_on_a_lost_node_is_removed_by_force(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    world.plane.release(claim)
    await world.turn()  # Nothing confirms it.
    assert world.kube.of("Pod")
    world.now += timedelta(seconds=120)
    await world.turn()
    assert world.kube.of("Pod") == []
    await world.turn()
    assert world.plane.claims_ == {}


async def test_pods_of_claims_that_nobody_knows_are_deleted(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    del world.plane.claims_[claim]
    world.plane._change()
    await world.turn()
    world.reap()
    assert world.kube.of("Pod") == []


async def test_before_the_first_list_of_claims_nothing_is_touched(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.loop = world.operator()
    await world.loop.run_pass()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]


async def test_a_claim_waits_for_the_object_of_its_job(world: World) -> None:
    claim = world.plane.file(job="later")
    assert await world.turn() == 1.0
    assert world.kube.of("Pod") == []
    world.add_job("later")
    await world.turn()
    assert world.kube.names("Pod") == [f"sb-{claim}"]


async def test_other_namespaces_are_left_alone() -> None:
    world = World(SETTINGS.model_copy(update={"namespaces": ["team"]}))
    world.add_job("job", "elsewhere")
    world.plane.file(namespace="elsewhere")
    await world.turn()
    assert world.kube.of("Pod") == []


async def test_creation_is_limited(world: World) -> None:
    world.settings = SETTINGS.model_copy(
        update={
            "sandbox_creation": SETTINGS.sandbox_creation.model_copy(update={"burst": 3, "per_second": 0.01})
        }
    )
    world.loop = world.operator()
    for _ in range(8):
        world.plane.file()
    after = await world.turn(3)
    assert len(world.kube.of("Pod")) == 3
    assert after is not None
    assert 50 < after <= 100


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the doubles raise no event for it
        await asyncio.sleep(0.001)


async def test_it_runs_by_itself(world: World) -> None:
    """It runs the tasks of `run`: claims by long poll, pods by the cache, no timer."""
    running_loop = asyncio.create_task(world.loop.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            claim = world.plane.file()
            await until(lambda: f"sb-{claim}" in world.kube.names("Pod"))
            world.start()
            await until(lambda: world.state(claim) == "Bound")
            world.plane.release(claim)
            await until(lambda: "deletionTimestamp" in world.pod(f"sb-{claim}")["metadata"])
            world.reap()
            await until(lambda: not world.plane.claims_)
    finally:
        running_loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_loop


def _refusals(dice: random.Random) -> Iterator[KubeError | None]:
    while True:
        yield dice.choice(
            [
                *[None] * 9,
                KubeError(429, "TooManyRequests", "slow down", retry_after=0.1),
                KubeError(503, "ServiceUnavailable", "etcd is not there"),
                KubeError(0, "Unreachable", "no answer"),
                KubeConflict(409, "Conflict", "the object has been modified"),
            ]
        )


@pytest.mark.parametrize("seed", range(25))
async def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """The faults are those of API server and control plane, lost watches, killed operators and dying pods."""
    dice = random.Random(seed)
    creation = SETTINGS.sandbox_creation.model_copy(update={"burst": 1000, "per_second": 1000.0})
    world = World(SETTINGS.model_copy(update={"sandbox_creation": creation}))
    faults = _refusals(dice)
    bound: dict[str, str] = {}

    def faulty(on: bool) -> None:
        world.kube.refuse = lambda verb, obj: next(faults) if on else None
        world.plane.fault = lambda: on and dice.random() < 0.15

    def check() -> None:
        addresses = [claim.address for claim in world.plane.claims_.values() if claim.state == "Bound"]
        assert len(addresses) == len(set(addresses)), "two claims share a sandbox"
        for claim in world.plane.claims_.values():
            if claim.state == "Bound":
                assert bound.setdefault(claim.id, claim.address) == claim.address

    faulty(True)
    for _ in range(80):
        action = dice.randrange(10)
        claims = list(world.plane.claims_)
        pods = world.kube.of("Pod")
        if action <= 2:
            world.plane.file(replace_cpu(dice.choice([1.0, 2.0])))
        elif action == 3 and claims:
            world.plane.release(dice.choice(claims))
        elif action == 4:
            world.plane.want(dice.randrange(4), replace_cpu(dice.choice([1.0, 2.0])))
        elif action == 5 and pods:
            world.status(dice.choice(pods), **ended(1))
        elif action == 6 and pods:
            world.kube.remove("Pod", *key_of(dice.choice(pods)))
        elif action == 7:
            world.deaf = not world.deaf
            if not world.deaf:
                world.resync()
        elif action == 8:
            world.loop = world.operator()
        world.start()
        if dice.random() < 0.5:
            world.reap()
        world.now += timedelta(seconds=dice.random())
        await world.turn()
        check()

    faulty(False)
    world.deaf = False
    world.resync()
    for _ in range(12):
        world.now += timedelta(seconds=61)
        world.start()
        world.reap()
        await world.turn()
        check()
    calls = len(world.kube.calls)
    await world.turn(3)
    assert len(world.kube.calls) == calls, "a repeat does nothing"
    listed = {claim.id: claim.state for claim in (await world.plane.claims()).claims}
    assert set(listed.values()) <= {"Bound"}
    claimed = {
        pod["metadata"]["labels"][labels.CLAIM]
        for pod in world.kube.of("Pod")
        if labels.CLAIM in pod["metadata"]["labels"]
    }
    assert claimed == set(listed)
    warm = [pod for pod in world.kube.of("Pod") if labels.CLAIM not in pod["metadata"]["labels"]]
    assert len(warm) == sum(want.count for want in world.plane.warm)


def replace_cpu(cpu: float) -> SandboxShape:
    return SHAPE.model_copy(update={"cpu": cpu})


async def test_a_network_policy_that_somebody_deleted_is_back_before_the_next_sandbox(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    (policy,) = world.kube.names("NetworkPolicy")
    world.kube.remove("NetworkPolicy", "team", policy)
    world.status(world.pod(f"sb-{claim}"), **ended(78, message="NotIsolated: 10.0.0.1:443 answers"))
    await world.turn()
    assert world.state(claim) == "Failed"
    again = world.plane.file()
    await world.turn()
    assert f"sb-{again}" in world.kube.names("Pod")
    assert world.kube.names("NetworkPolicy") == [policy]
