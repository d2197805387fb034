"""The meaning of a pod's status: the state of a workload or sandbox, and its trouble in the pod's words.

This module is pure and reads the JSON of pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rollyard_crds.claims import EXEC_PORT
from rollyard_drivers.reconcile.log_errors import last_line, points_elsewhere, telling
from rollyard_drivers.reconcile.plan import ObservedWorkload, WorkloadState

from rollyard_operator.kube import labels
from rollyard_operator.pods.observed_sandbox import Hope, ObservedSandbox, SandboxState, Trouble

BACKEND_PORT = 8000
MODEL_CONTAINER = "model"
"""The name of the init container that downloads a backend's model."""
MESSAGE_LIMIT = 512
FURTHER_UP = "further up in its log: kubectl logs"
ENGINE_DIED = "a server ends like this if its engine process has died, or if it was stopped"
NOT_ISOLATED = 78
"""The exit status of an exec server that could reach a forbidden address."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_PULLING = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_CREATING = frozenset(
    {
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        "PreCreateHookError",
        "PreStartHookError",
        "PostStartHookError",
        "CrashLoopBackOff",
    }
)
_NO_SUCH_IMAGE = re.compile(
    r"code = NotFound|manifest unknown|repository does not exist|pull access denied|no such image",
    re.IGNORECASE,
)
_TAKEN_AWAY = frozenset({"Evicted", "NodeLost", "Preempting", "Shutdown", "NodeShutdown", "Terminated"})
"""Values of `status.reason` of pods that the cluster ended."""
_OWN_DISK = re.compile(r"exceed(s|ed) (the|its local ephemeral storage|the total) limit")
"""Is found in the kubelet's message if it evicted a pod for what the pod itself has written."""


def parse_time(text: str | None) -> datetime | None:
    """Return a time in the API server's format as a datetime, or None for an empty text."""
    return datetime.fromisoformat(text) if text else None


def created_at(pod: Mapping[str, Any]) -> datetime:
    """Return when the pod was created."""
    return parse_time(pod["metadata"].get("creationTimestamp")) or _EPOCH


def _status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _condition(pod: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions: Iterable[Mapping[str, Any]] = _status(pod).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def _main(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `state` of the main container, which is the first one."""
    name = pod["spec"]["containers"][0]["name"]
    for status in _status(pod).get("containerStatuses") or ():
        if status.get("name") == name:
            state: Mapping[str, Any] = status.get("state") or {}
            return state
    return {}


def _running_init(pod: Mapping[str, Any]) -> str:
    """Return the name of the init container that runs, or an empty string."""
    statuses = _status(pod).get("initContainerStatuses") or ()
    return next((str(one["name"]) for one in statuses if "running" in (one.get("state") or {})), "")


def _failed_init(pod: Mapping[str, Any]) -> str:
    """Return the name of the template's init container that has failed, or an empty string."""
    for one in _status(pod).get("initContainerStatuses") or ():
        code = ((one.get("state") or {}).get("terminated") or {}).get("exitCode")
        if code and one["name"] != MODEL_CONTAINER:
            return str(one["name"])
    return ""


def _states(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = _status(pod)
    both = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return [one.get("state") or {} for one in both]


def _last_words(text: str) -> str:
    """Return the most useful line at the end of a log. The kubelet passes on at most 2 KiB of it."""
    if said := telling(text):
        return said
    said = last_line(text)
    return f"{said} ({FURTHER_UP})" if points_elsewhere(said) else said


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether the kubelet reports that the pod accepts connections."""
    return _condition(pod, "Ready").get("status") == "True"


def pod_address(pod: Mapping[str, Any], port: int) -> str:
    """Return the pod's address as `HOST:PORT`, or an empty string while it has none."""
    host = str(_status(pod).get("podIP") or "")
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") if host else ""


def starting_address(pod: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return host and port of an exec server that may listen already, before the kubelet has noticed it."""
    host = str(_status(pod).get("podIP") or "")
    ended = pod["metadata"].get("deletionTimestamp") or _status(pod).get("phase") in ("Succeeded", "Failed")
    if not host or ended or is_ready(pod) or "running" not in _main(pod):
        return None
    return host, EXEC_PORT


def _port(pod: Mapping[str, Any]) -> int:
    ports: list[Mapping[str, Any]] = pod["spec"]["containers"][0].get("ports") or []
    return int(ports[0]["containerPort"]) if ports else BACKEND_PORT


def start_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """Return what keeps a pod from starting, or None if the start merely takes time."""
    scheduled = _condition(pod, "PodScheduled")
    since = parse_time(scheduled.get("lastTransitionTime")) or created_at(pod)
    for state in _states(pod):
        waiting = state.get("waiting") or {}
        word, text = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if word in _NEVER or word in _PULLING:
            hope: Hope = "none" if word in _NEVER or _NO_SUCH_IMAGE.search(text) else "kubelet"
            return Trouble("ImagePullFailed", _said(word, text), since, hope, retryable=hope != "none")
        if word in _CREATING:
            return Trouble("StartFailed", _said(word, text), since, "kubelet")
    if scheduled.get("status") == "False":
        text = str(scheduled.get("message", ""))
        if scheduled.get("reason") == "SchedulingGated":
            queue = labels.label_of(pod, labels.QUEUE)
            gate = f"held back until queue {queue!r} admits it" if queue else "held back by a scheduling gate"
            return Trouble("SchedulingGated", f"{gate} ({text})" if text else gate, since, "gate")
        if scheduled.get("reason") == "Unschedulable":
            return Trouble("Unschedulable", _said("Unschedulable", text), since, "scheduler")
    return None


def _said(word: str, text: str) -> str:
    return f"{word}: {text}"[:MESSAGE_LIMIT] if text else word


def end_trouble(pod: Mapping[str, Any]) -> Trouble | None:
    """Return why a pod has ended or is being removed, or None if neither is the case."""
    status = _status(pod)
    phase, word, text = status.get("phase"), str(status.get("reason", "")), str(status.get("message", ""))
    doomed = _condition(pod, "DisruptionTarget")
    deleted = parse_time(pod["metadata"].get("deletionTimestamp"))
    ends = [state["terminated"] for state in _states(pod) if state.get("terminated")]
    bad = [end for end in ends if end.get("exitCode") or end.get("reason") == "OOMKilled"]
    end = (bad or ends or [{}])[-1]
    at = parse_time(end.get("finishedAt")) or deleted or created_at(pod)
    if word in _TAKEN_AWAY or phase == "Unknown":
        reason = "Evicted" if word == "Evicted" else "SandboxLost"
        sandbox = labels.label_of(pod, labels.COMPONENT) == "sandbox"
        if sandbox and reason == "Evicted" and _OWN_DISK.search(text):
            reason = "OutOfDisk"  # Its own commands caused this, as they cause an end for too much memory.
        return Trouble(reason, _said(word or "Unknown", text), at)
    if phase not in ("Succeeded", "Failed"):
        if deleted is None:
            return None
        why = _said(str(doomed.get("reason", "")), str(doomed.get("message", ""))) if doomed else ""
        return Trouble("SandboxLost", f"the pod was deleted{f' ({why})' if why else ''}", deleted)
    said = _last_words(str(end.get("message", "")))[:MESSAGE_LIMIT]
    if end.get("reason") == "OOMKilled":
        return Trouble("OutOfMemory", f"OOMKilled: out of memory{_limit(pod)}", at)
    if doomed.get("status") == "True":
        message = _said(str(doomed.get("reason", "")), str(doomed.get("message", "")))
        return Trouble("SandboxLost", message, at)
    if end.get("exitCode") == NOT_ISOLATED and labels.label_of(pod, labels.COMPONENT) == "sandbox":
        return Trouble("NotIsolated", said or "the sandbox could reach what it must not", at)
    if end.get("reason") in ("StartError", "ContainerCannotRun"):
        return Trouble("StartFailed", said or str(end["reason"]), at, retryable=False)
    if word and not end:
        # The kubelet refused the pod before anything ran (OutOfcpu, UnexpectedAdmissionError, NodeAffinity,
        # …).
        return Trouble("SandboxLost", _said(word, text), at)
    code = end.get("exitCode")
    how = "ended" if code is None else f"exited with {code}"
    return Trouble("SandboxExited", f"{how}: {said}" if said else how, at)


def _limit(pod: Mapping[str, Any]) -> str:
    """Return the limit of the memory that was too small, for a message."""
    failed = _failed_init(pod)
    containers = [one for one in pod["spec"].get("initContainers") or () if one["name"] == failed]
    resources = (containers or pod["spec"]["containers"])[0].get("resources") or {}
    memory = (resources.get("limits") or {}).get("memory")
    return f" (limit {memory})" if memory else ""


def _exit_code(pod: Mapping[str, Any], trouble: Trouble) -> int | None:
    """Return the exit status, with a signal as a negative number, or None if the cluster ended the pod."""
    if trouble.reason in ("Evicted", "SandboxLost"):
        return None
    codes = [state["terminated"].get("exitCode") for state in _states(pod) if state.get("terminated")]
    code = next((code for code in codes if code), codes[-1] if codes else None)
    return 128 - code if code is not None and 128 < code <= 192 else code


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else 0


def observed_workload(pod: Mapping[str, Any]) -> ObservedWorkload:
    """Return the state of a stage worker's or a backend's pod for the reconcile.

    For a backend this is the result of the kubelet's probe. A caller that knows more, such as the outcome of
    a first completion, replaces `state`, `ready`, `unready_since` and `message`.
    """
    meta, main, name = pod["metadata"], _main(pod), workload_of(pod)
    assigned = parse_time(labels.annotation_of(pod, labels.ASSIGNED_AT))
    backend = labels.label_of(pod, labels.COMPONENT) == "backend"
    phase = _status(pod).get("phase")
    ended, trouble = end_trouble(pod), None
    state: WorkloadState
    if meta.get("deletionTimestamp"):
        state = "stopping"
    elif ended is not None:
        state = "exited"
    elif phase == "Running" and "waiting" not in main and main:
        state = "running"
    else:
        state, trouble = "starting", start_trouble(pod)
    created = created_at(pod)
    begun = parse_time((main.get("running") or main.get("terminated") or {}).get("startedAt"))
    address = pod_address(pod, _port(pod))
    ready = is_ready(pod) if backend else True
    unready = None
    if backend and state == "running" and not ready:
        unready = parse_time(_condition(pod, "Ready").get("lastTransitionTime"))
    code = _exit_code(pod, ended) if ended is not None and state == "exited" else None
    message = trouble.message if trouble is not None else ""
    if state == "starting" and not message and (init := _running_init(pod)):
        what = "its model is being downloaded" if init == MODEL_CONTAINER else f"init container {init!r} runs"
        message = f"{what} (kubectl logs {name} -c {init})"
    if ended is not None:
        # The exit code is shown next to the message.
        message = re.sub(r"^(exited with \d+|ended)(: )?", "", ended.message)
        if init := _failed_init(pod):
            message = f"init container {init!r}: {message or f'no message (kubectl logs {name} -c {init})'}"
    if backend and code == 0 and not message:
        message = ENGINE_DIED
    return ObservedWorkload(
        name=name,
        spec_hash=labels.annotation_of(pod, labels.SPEC_HASH),
        state=state,
        # For a container that could not be started, the kubelet reports a start in 1970.
        started_at=max(time for time in (created, begun, assigned) if time is not None),
        restarts=_count(labels.annotation_of(pod, labels.RESTARTS)),
        last_end=labels.annotation_of(pod, labels.LAST_END),
        exit_code=code,
        exited_at=ended.since if ended is not None and state == "exited" else None,
        ready=ready,
        unready_since=unready,
        url=f"http://{address}" if backend and address else "",
        message=message,
        blocked=trouble is not None and trouble.hope != "gate",
        pending=state == "starting",
        draining_since=parse_time(labels.annotation_of(pod, labels.DRAINING_SINCE)),
        worker="" if backend else worker_name(name, meta["uid"]),
    )


def workload_of(pod: Mapping[str, Any]) -> str:
    """Return the name of the workload that a pod runs.

    It is the pod's own name, unless the pod stood ready before the workload was planned.
    """
    return labels.annotation_of(pod, labels.WORKLOAD) or str(pod["metadata"]["name"])


def worker_name(workload: str, uid: str) -> str:
    """Return the name under which the stage worker in a pod leases rollouts.

    Pods of the same workload follow each other, so the name of the workload alone is not enough.
    """
    return f"{workload}.{uid}"


def observed_sandbox(pod: Mapping[str, Any], token_hash: str) -> ObservedSandbox:
    """Return the state of a sandbox pod for the reconcile.

    Args:
        token_hash: The SHA-256 hash of the secret that the operator derives for this pod. If the pod was made
            with another secret, no process could use it.
    """
    meta = pod["metadata"]
    state: SandboxState
    trouble = end_trouble(pod)
    if meta.get("deletionTimestamp"):
        state = "stopping"
    elif trouble is not None:
        state = "failed"
    elif is_ready(pod) and _status(pod).get("podIP"):
        state = "ready"
    else:
        state, trouble = "starting", start_trouble(pod)
    address = pod_address(pod, EXEC_PORT)
    return ObservedSandbox(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        flavor=labels.label_of(pod, labels.SHAPE),
        claim=labels.label_of(pod, labels.CLAIM),
        state=state,
        created_at=created_at(pod),
        address=f"tcp://{address}" if address else "",
        trouble=trouble,
        usable=labels.annotation_of(pod, labels.TOKEN_HASH) == token_hash,
        gone_due=parse_time(meta.get("deletionTimestamp")),
    )
