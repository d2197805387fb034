"""What statuses of pods mean, on statuses as clusters write them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from rollyard_operator.kube import labels
from rollyard_operator.pods.status import observed_sandbox, observed_workload, start_trouble, starting_address

T0, T1, T2 = "2026-01-01T00:00:00Z", "2026-01-01T00:00:02Z", "2026-01-01T00:05:00Z"
AT0, AT1, AT2 = (datetime.fromisoformat(text) for text in (T0, T1, T2))
Object = dict[str, Any]


def pod(component: str, status: Object, **meta: Any) -> Object:
    """Return a pod whose container is called as its component asks, also where `status` calls it NAME."""
    name = component.removeprefix("stage-")
    for container in status.get("containerStatuses") or ():
        if container["name"] == "NAME":
            container["name"] = name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "team",
            "uid": "u1",
            "creationTimestamp": T0,
            "labels": {labels.COMPONENT: component, labels.SHAPE: "f", labels.CLAIM: "c1"},
            "annotations": {
                labels.SPEC_HASH: "abcd",
                labels.RESTARTS: "2",
                labels.LAST_END: "was lost",
                labels.TOKEN_HASH: "hash",
            },
            **meta,
        },
        "spec": {"containers": [{"name": name, "resources": {"limits": {"memory": "2Gi"}}}]},
        "status": status,
    }


def condition(kind: str, status: str, reason: str = "", message: str = "", at: str = T1) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at}


SCHEDULED = condition("PodScheduled", "True")


def waiting(reason: str, message: str = "", name: str = "NAME") -> Object:
    return {"name": name, "ready": False, "state": {"waiting": {"reason": reason, "message": message}}}


def started(name: str = "NAME", ready: bool = True) -> Object:
    return {"name": name, "ready": ready, "started": True, "state": {"running": {"startedAt": T1}}}


def over(code: int, reason: str, message: str = "", name: str = "NAME") -> Object:
    state = {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": T1,
            "finishedAt": T2,
            "containerID": "containerd://1",
        }
    }
    return {"name": name, "ready": False, "state": state}


def status(
    phase: str, *containers: Object, conditions: tuple[Object, ...] = (SCHEDULED,), **more: Any
) -> Object:
    return {"phase": phase, "conditions": list(conditions), "containerStatuses": list(containers), **more}


def pending(reason: str, message: str = "", /, **more: Any) -> Object:
    return status("Pending", waiting(reason, message), **more)


def going(**more: Any) -> Object:
    return status("Running", started(), **more)


def failed(code: int, reason: str = "Error", message: str = "", /, **more: Any) -> Object:
    return status("Failed", over(code, reason, message), **more)


NOT_THERE = (
    'Back-off pulling image "registry.example/nope:1": ErrImagePull: rpc error: code = NotFound desc = '
    'failed to pull and unpack image "registry.example/nope:1": failed to resolve reference: not found'
)
NO_REGISTRY = (
    'failed to pull and unpack image "registry.example/a:1": failed to do request: Head '
    '"https://registry.example/v2/a/manifests/1": dial tcp: lookup registry.example: no such host'
)
NO_NODE = "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available."
FULL_DISK = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
GATED = "Scheduling is blocked due to non-empty scheduling gates"
UNSCHEDULABLE = status("Pending", conditions=(condition("PodScheduled", "False", "Unschedulable", NO_NODE),))
HELD = status("Pending", conditions=(condition("PodScheduled", "False", "SchedulingGated", GATED),))


@pytest.mark.parametrize(
    ("what", "reason", "hope", "retryable", "words"),
    [
        (pending("ContainerCreating"), None, None, None, ""),
        (pending("PodInitializing"), None, None, None, ""),
        ({"phase": "Pending"}, None, None, None, ""),
        ({}, None, None, None, ""),
        (pending("ImagePullBackOff", NOT_THERE), "ImagePullFailed", "none", False, "nope:1"),
        (pending("ErrImagePull", NO_REGISTRY), "ImagePullFailed", "kubelet", True, "no such host"),
        (
            pending("ErrImageNeverPull", 'Container image "a:1" is not present'),
            "ImagePullFailed",
            "none",
            False,
            "ErrImageNeverPull",
        ),
        (pending("InvalidImageName", "a b"), "ImagePullFailed", "none", False, "a b"),
        (
            pending("CreateContainerConfigError", 'secret "rollyard-worker" not found'),
            "StartFailed",
            "kubelet",
            True,
            'secret "rollyard-worker" not found',
        ),
        (
            pending(
                "PodInitializing", initContainerStatuses=[waiting("ErrImagePull", NO_REGISTRY, "runtime")]
            ),
            "ImagePullFailed",
            "kubelet",
            True,
            "no such host",
        ),
        (UNSCHEDULABLE, "Unschedulable", "scheduler", True, "Insufficient cpu"),
        (HELD, "SchedulingGated", "gate", True, "held back by a scheduling gate"),
    ],
)
def test_what_keeps_a_pod_from_starting(
    what: Object, reason: str | None, hope: str | None, retryable: bool | None, words: str
) -> None:
    trouble = start_trouble(pod("sandbox", what))
    if reason is None:
        assert trouble is None
        return
    assert trouble is not None
    assert (trouble.reason, trouble.hope, trouble.retryable) == (reason, hope, retryable)
    assert words in trouble.message
    assert trouble.since == AT1


def test_a_gated_pod_names_its_queue() -> None:
    held = pod("sandbox", HELD)
    held["metadata"]["labels"][labels.QUEUE] = "team-queue"
    trouble = start_trouble(held)
    assert trouble is not None
    assert "until queue 'team-queue' admits it" in trouble.message


READY = (SCHEDULED, condition("Ready", "True"))
UNREADY = (SCHEDULED, condition("Ready", "False", "ContainersNotReady", at=T2))
DISRUPTED = (condition("DisruptionTarget", "True", "PreemptionByScheduler", "preempted by a pod"),)
PYDANTIC = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Invalid repository ID or local directory specified: '/models/empty'.
Please verify the following requirements:
1. Provide a valid Hugging Face repository ID.
 [type=value_error, input_value=ArgsKwargs((), {'model': ...}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
POINTING = """    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
ROOT_CAUSE = (
    "(Worker pid=26) ERROR 11-22 [multiproc_executor.py:953] a.b.SafetensorError: incomplete metadata"
)
TRACE = "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'mine'\n"


@pytest.mark.parametrize(
    ("what", "meta", "state", "code", "words"),
    [
        ({}, {}, "starting", None, ""),
        (pending("ContainerCreating"), {}, "starting", None, ""),
        (pending("ImagePullBackOff", NOT_THERE), {}, "starting", None, "nope:1"),
        (UNSCHEDULABLE, {}, "starting", None, "Insufficient cpu"),
        (HELD, {}, "starting", None, "scheduling gate"),
        (going(), {}, "running", None, ""),
        (going(), {"deletionTimestamp": T2}, "stopping", None, "deleted"),
        (failed(143), {"deletionTimestamp": T2}, "stopping", None, ""),
        (status("Succeeded", over(0, "Completed")), {}, "exited", 0, ""),
        (failed(2, "Error", TRACE), {}, "exited", 2, "ModuleNotFoundError: No module named 'mine'"),
        (failed(1, "Error", PYDANTIC), {}, "exited", 1, "local directory specified: '/models/"),
        (
            failed(1, "Error", f"{ROOT_CAUSE}\n{POINTING}"),
            {},
            "exited",
            1,
            "a.b.SafetensorError: incomplete metadata",
        ),
        (failed(1, "Error", POINTING), {}, "exited", 1, "further up in its log: kubectl logs"),
        (failed(137, "OOMKilled"), {}, "exited", -9, "out of memory (limit 2Gi)"),
        # The engine's process was killed for its memory, and the server then ends by itself.
        (status("Succeeded", over(0, "OOMKilled")), {}, "exited", 0, "out of memory (limit 2Gi)"),
        (failed(143), {}, "exited", -15, ""),
        (failed(128, "StartError", "exec: python: not found"), {}, "exited", 128, "python: not found"),
        (
            failed(137, reason="Evicted", message="The node was low on resource: memory."),
            {},
            "exited",
            None,
            "The node was low on resource: memory.",
        ),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no GPUs"},
            {},
            "exited",
            None,
            "no GPUs",
        ),
        (failed(143, conditions=DISRUPTED), {}, "exited", None, "PreemptionByScheduler"),
        (
            going(reason="NodeLost", message="Node n1 which was running pod p is unresponsive"),
            {},
            "exited",
            None,
            "unresponsive",
        ),
        ({"phase": "Unknown"}, {}, "exited", None, "Unknown"),
        # What the kubelet says of the whole pod is no reason for an end that has one of its own.
        (failed(3, "Error", "mine", reason="Error", message="of the pod"), {}, "exited", 3, "mine"),
        # The container that failed tells more than the one that was ended with it.
        (
            failed(0, "Completed", "good", initContainerStatuses=[over(4, "Error", "bad", "init")]),
            {},
            "exited",
            4,
            "bad",
        ),
        (failed(128), {}, "exited", 128, ""),
        (failed(193), {}, "exited", 193, ""),
        (status("Running", waiting("ContainerCreating")), {}, "starting", None, ""),
        (
            failed(1, "Error", "own", conditions=(condition("DisruptionTarget", "False"),)),
            {},
            "exited",
            1,
            "own",
        ),
    ],
)
def test_a_workers_pod(what: Object, meta: Object, state: str, code: int | None, words: str) -> None:
    seen = observed_workload(pod("stage-worker", what, **meta))
    assert (seen.state, seen.exit_code) == (state, code)
    assert words in seen.message
    assert seen.message or not words
    assert (seen.name, seen.spec_hash, seen.restarts, seen.last_end) == ("p", "abcd", 2, "was lost")
    assert seen.pending == (state == "starting")
    assert (seen.exited_at is not None) == (state == "exited")


def test_a_server_that_ends_by_itself_is_told() -> None:
    for code, words in ((0, "its engine process has died"), (3, "")):
        seen = observed_workload(pod("backend", status("Succeeded", over(code, "Error"))))
        assert (seen.state, seen.exit_code) == ("exited", code)
        assert words in seen.message
        assert bool(seen.message) == bool(words)


def test_blocked_is_what_is_wrong_and_not_what_waits() -> None:
    def blocked(what: Object) -> bool:
        return observed_workload(pod("stage-worker", what)).blocked

    assert blocked(pending("ImagePullBackOff", NOT_THERE))
    assert blocked(UNSCHEDULABLE)
    assert not blocked(HELD)
    assert not blocked(pending("ContainerCreating"))


def test_times_are_those_of_the_container() -> None:
    exited = observed_workload(pod("stage-worker", failed(1)))
    assert (exited.started_at, exited.exited_at) == (AT1, AT2)
    assert observed_workload(pod("stage-worker", {})).started_at == AT0
    drained = pod("backend", status("Running"))
    drained["metadata"]["annotations"][labels.DRAINING_SINCE] = T2
    assert observed_workload(drained).draining_since == AT2


@pytest.mark.parametrize(
    ("conditions", "ip", "ready", "url", "unready"),
    [
        (READY, "10.0.0.7", True, "http://10.0.0.7:8000", None),
        (UNREADY, "10.0.0.7", False, "http://10.0.0.7:8000", AT2),
        (READY, "fd00::7", True, "http://[fd00::7]:8000", None),
        (UNREADY, None, False, "", AT2),
    ],
)
def test_a_backends_pod(
    conditions: tuple[Object, ...], ip: str | None, ready: bool, url: str, unready: datetime | None
) -> None:
    more = {"podIP": ip} if ip else {}
    what = pod("backend", going(conditions=conditions, **more))
    seen = observed_workload(what)
    assert (seen.state, seen.ready, seen.url, seen.unready_since) == ("running", ready, url, unready)


def test_a_backend_may_listen_elsewhere() -> None:
    what = pod("backend", going(podIP="10.0.0.7"))
    what["spec"]["containers"][0]["ports"] = [{"name": "http", "containerPort": 9000}]
    assert observed_workload(what).url == "http://10.0.0.7:9000"


@pytest.mark.parametrize(
    ("what", "meta", "state", "reason", "words"),
    [
        (going(conditions=READY, podIP="10.0.0.9"), {}, "ready", None, ""),
        (going(conditions=UNREADY, podIP="10.0.0.9"), {}, "starting", None, ""),
        (going(conditions=READY), {}, "starting", None, ""),
        (HELD, {}, "starting", "SchedulingGated", ""),
        (failed(137, "OOMKilled"), {}, "failed", "OutOfMemory", "out of memory"),
        (
            failed(78, "Error", "NotIsolated: 10.96.0.1:443 answers after 10 s"),
            {},
            "failed",
            "NotIsolated",
            "10.96.0.1:443 answers",
        ),
        (failed(78), {}, "failed", "NotIsolated", "could reach"),
        (failed(1, "Error", "cannot listen"), {}, "failed", "SandboxExited", "cannot listen"),
        (status("Succeeded", over(0, "Completed")), {}, "failed", "SandboxExited", "exited with 0"),
        (
            failed(128, "StartError", 'exec: "/.rollyard/loader": no such file'),
            {},
            "failed",
            "StartFailed",
            "/.rollyard/loader",
        ),
        (
            failed(137, reason="Evicted", message=FULL_DISK),
            {},
            "failed",
            "OutOfDisk",
            "exceeds the total limit of containers 1Gi",
        ),
        # Only an eviction says so; and one for what others have written is none of the sandbox's doing.
        (
            failed(137, reason="NodeLost", message=FULL_DISK),
            {},
            "failed",
            "SandboxLost",
            "exceeds the total limit",
        ),
        (
            failed(137, reason="Evicted", message="The node was low on resource: ephemeral-storage."),
            {},
            "failed",
            "Evicted",
            "low on resource",
        ),
        (
            {"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource: cpu"},
            {},
            "failed",
            "SandboxLost",
            "OutOfcpu: Node didn't have",
        ),
        (
            status("Failed", initContainerStatuses=[over(1, "Error", "No space left on device", "runtime")]),
            {},
            "failed",
            "SandboxExited",
            "No space left",
        ),
        (
            going(conditions=(*READY, *DISRUPTED), podIP="10.0.0.9"),
            {"deletionTimestamp": T2},
            "stopping",
            "SandboxLost",
            "preempted by a pod",
        ),
    ],
)
def test_a_sandboxs_pod(what: Object, meta: Object, state: str, reason: str | None, words: str) -> None:
    seen = observed_sandbox(pod("sandbox", what, **meta), "hash")
    assert seen.state == state
    assert (seen.trouble.reason if seen.trouble else None) == reason
    if seen.trouble is not None:
        assert words in seen.trouble.message
        assert seen.trouble.retryable == (reason != "StartFailed")
    assert (seen.claim, seen.flavor, seen.usable) == ("c1", "f", True)
    if state == "ready":
        assert seen.address == "tcp://10.0.0.9:7411"


def test_a_sandbox_with_another_secret_is_unusable() -> None:
    assert not observed_sandbox(pod("sandbox", {}), "another").usable


def test_a_status_78_is_not_isolated_only_of_sandboxes() -> None:
    seen = observed_workload(pod("stage-worker", failed(78)))
    assert (seen.exit_code, seen.message) == (78, "")


def test_only_a_sandbox_can_be_out_of_its_own_disk() -> None:
    what = failed(137, reason="Evicted", message=FULL_DISK)
    seen = observed_workload(pod("stage-worker", what))
    assert (seen.exit_code, seen.message) == (None, f"Evicted: {FULL_DISK}")


@pytest.mark.parametrize(
    ("what", "meta", "listens"),
    [
        (going(podIP="10.0.0.9"), {}, True),
        (going(podIP="10.0.0.9", conditions=UNREADY), {}, True),
        (going(podIP="10.0.0.9", conditions=READY), {}, False),
        (going(), {}, False),
        (pending("ContainerCreating", podIP="10.0.0.9"), {}, False),
        (status("Running", started("another"), podIP="10.0.0.9"), {}, False),
        (going(podIP="10.0.0.9"), {"deletionTimestamp": T2}, False),
        (status("Succeeded", started(), podIP="10.0.0.9"), {}, False),
        (status("Failed", started(), podIP="10.0.0.9"), {}, False),
    ],
)
def test_an_exec_server_may_listen_before_the_kubelet_has_noticed_it(
    what: Object, meta: Object, listens: bool
) -> None:
    found = starting_address(pod("sandbox", what, **meta))
    assert found == (("10.0.0.9", 7411) if listens else None)


def test_the_download_of_a_backends_model_is_seen() -> None:
    main = waiting("PodInitializing")
    seen = observed_workload(
        pod("backend", status("Pending", main, initContainerStatuses=[started("model")]))
    )
    assert (seen.state, seen.pending, seen.blocked) == ("starting", True, False)
    assert seen.message == "its model is being downloaded (kubectl logs p -c model)"
    fetching = status("Pending", waiting("PodInitializing"), initContainerStatuses=[started("fetch")])
    seen = observed_workload(pod("backend", fetching))
    assert (seen.state, seen.message) == ("starting", "init container 'fetch' runs (kubectl logs p -c fetch)")
    reason = "org/m is gated: accept its licence at https://huggingface.co/org/m"
    ended = over(1, "Error", f"Downloading\nerror: {reason}\n", "model")
    seen = observed_workload(pod("backend", status("Failed", main, initContainerStatuses=[ended])))
    assert (seen.state, seen.exit_code, seen.message) == ("exited", 1, f"error: {reason}")
    missing = waiting("CreateContainerConfigError", 'secret "hub-token" not found', "model")
    seen = observed_workload(pod("backend", status("Pending", main, initContainerStatuses=[missing])))
    assert (seen.state, seen.blocked) == ("starting", True)
    assert 'secret "hub-token" not found' in seen.message


def test_an_init_container_that_failed_is_named() -> None:
    def seen(code: int, reason: str, text: str) -> tuple[int | None, str]:
        init = [over(0, "Completed", name="first"), over(code, reason, text, name="fetch")]
        what = status("Failed", waiting("PodInitializing"), initContainerStatuses=init)
        made = pod("stage-worker", what)
        made["spec"]["initContainers"] = [{"name": "fetch", "resources": {"limits": {"memory": "64Mi"}}}]
        workload = observed_workload(made)
        assert workload.state == "exited"
        return workload.exit_code, workload.message

    assert seen(3, "Error", "no such bucket") == (3, "init container 'fetch': no such bucket")
    assert seen(3, "Error", "") == (3, "init container 'fetch': no message (kubectl logs p -c fetch)")
    assert "'fetch': OOMKilled: out of memory (limit 64Mi)" in seen(137, "OOMKilled", "")[1]
