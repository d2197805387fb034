"""The calls about jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, encode, listed, nothing, segment, typed
from rollyard_client.errors import Invalid

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.backendpool import BackendPool
    from rollyard_crds.fields.skipped_rows import SkippedRows
    from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
    from rollyard_crds.task import Task
    from rollyard_crds.unfinished import UnfinishedJobs

JOBS: Final = "/v1/rolloutjobs"
NDJSON: Final = "application/x-ndjson"
ALL_NAMESPACES: Final = "*"
"""What a caller gives in the place of a namespace to list the objects of all namespaces."""

Manifest: TypeAlias = "RolloutJob | BackendPool | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class PushedTasks:
    """What became of the tasks of one push."""

    accepted: int
    """The tasks that the stream took."""
    repeated: int
    """The tasks whose ids it had already, which changed nothing."""


@dataclass(frozen=True, slots=True)
class OpenedTarget:
    """A step of a stream with dynamic sampling."""

    id: str
    """The name that the trainer chose."""
    groups: int
    """How many groups with a signal the step needs."""
    goal: int
    """The step is met when the job has this many groups with a signal."""
    met: bool
    opened: bool
    """Whether this call opened it, and not an earlier one."""


def _job(answer: httpx.Response) -> RolloutJob:
    return crds.RolloutJob.model_validate_json(answer.content)


def document_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return the JSON form of a manifest, which is a model or a mapping. A model's status is left out."""
    if isinstance(manifest, Mapping):
        return manifest
    body = manifest.to_json()
    body.pop("status", None)
    return body


def placed(manifest: Manifest, namespace: str) -> Mapping[str, Any]:
    """Return the JSON form of a manifest, in `namespace` if it names none."""
    document = document_of(manifest)
    meta = document.get("metadata")
    if not isinstance(meta, Mapping):
        return document  # The server refuses it, and names the field.
    if "namespace" in (meta if isinstance(manifest, Mapping) else manifest.metadata.model_fields_set):
        return document
    return {**document, "metadata": {**meta, "namespace": namespace}}


def scope(namespace: str) -> str | None:
    """Return the namespace whose objects are listed, or None for all."""
    return None if namespace == ALL_NAMESPACES else namespace


def registered(manifest: RolloutJob | BackendPool) -> dict[str, Any]:
    """Return a manifest with the part of its metadata that the control plane keeps on registration."""
    meta = manifest.metadata
    metadata = crds.ObjectMeta(
        name=meta.name, namespace=meta.namespace, labels=meta.labels, annotations=meta.annotations
    )
    return {**document_of(manifest), "metadata": metadata.to_json()}


def submit(manifest: RolloutJob | Mapping[str, Any], namespace: str, timeout: float) -> Call[RolloutJob]:
    """Return the call that submits a job, in `namespace` if its manifest names none.

    The server may take `timeout` seconds beyond the usual timeout to read a large task list.
    """
    return Call("POST", JOBS, _job, body=encode(placed(manifest, namespace)), wait=timeout)


def jobs(
    namespace: str | None, after: str | None, *, bare: bool = False, finished: bool | None = None
) -> Call[tuple[list[RolloutJob], str | None]]:
    """Return the call that lists a page of jobs.

    Args:
        namespace: The namespace of the jobs. None selects all namespaces.
        after: The continuation of the last page, or None for the first page.
        bare: Leave out inline tasks.
        finished: List only jobs that have ended, or only jobs that have not. None lists both.
    """
    query = {
        "namespace": namespace,
        "continue": after,
        "omit": "tasks" if bare else None,
        "finished": finished,
    }
    return Call("GET", JOBS, listed(crds.RolloutJob.model_validate), query=query)


def job(name: str, namespace: str) -> Call[RolloutJob]:
    """Return the call that reads one job with its tasks and live counts."""
    return Call("GET", f"{JOBS}/{segment(name)}", _job, query={"namespace": namespace})


def register_job(
    manifest: RolloutJob,
    tasks: Sequence[Task | Mapping[str, Any]] | None,
    skipped: SkippedRows | None,
    timeout: float,
) -> Call[RolloutJob]:
    """Return the call with which a driver registers a job.

    Args:
        manifest: The job.
        tasks: The tasks of its ConfigMap, if it has one.
        skipped: The rows of its ConfigMap that were left out, if there are any.
        timeout: The seconds beyond the usual timeout that the server may take to read the tasks.
    """
    meta = manifest.metadata
    body: dict[str, Any] = {"manifest": registered(manifest)}
    if tasks is not None:
        body["tasks"] = [
            task if isinstance(task, Mapping) else task.model_dump(mode="json", exclude_none=True)
            for task in tasks
        ]
    if skipped is not None and skipped.count:
        body["skipped"] = skipped.to_json()
    query = {"namespace": meta.namespace}
    return Call("PUT", f"{JOBS}/{segment(meta.name)}", _job, query=query, body=encode(body), wait=timeout)


def delete_job(name: str, namespace: str) -> Call[None]:
    """Return the call that cancels and removes a job."""
    # It is not sent again once it may have arrived, because a repeat would be answered with 404.
    return Call(
        "DELETE", f"{JOBS}/{segment(name)}", nothing, query={"namespace": namespace}, idempotent=False
    )


def cancel(name: str, namespace: str, target: Mapping[str, str]) -> Call[RolloutJob]:
    """Return the call that cancels rollouts of a job.

    `target` is {} for the whole job, or else {"group": id} or {"rollout": id}.
    """
    path = f"{JOBS}/{segment(name)}/cancel"
    return Call("POST", path, _job, query={"namespace": namespace}, body=encode(target))


def close_stream(name: str, namespace: str) -> Call[RolloutJob]:
    """Return the call that closes a stream, which means that no more tasks will come."""
    return Call("POST", f"{JOBS}/{segment(name)}/close", _job, query={"namespace": namespace}, body=b"{}")


def open_target(name: str, namespace: str, step: str, groups: int | None) -> Call[OpenedTarget]:
    """Return the call that opens a step of a stream with dynamic sampling.

    It may be sent again, because a step is opened only once.
    """
    body = {"id": step} if groups is None else {"id": step, "groups": groups}
    path = f"{JOBS}/{segment(name)}/targets"
    return Call("POST", path, typed(OpenedTarget), query={"namespace": namespace}, body=encode(body))


def patch(name: str, namespace: str, changes: Mapping[str, Any]) -> Call[RolloutJob]:
    """Return the call that changes fields of a job's spec, named as in JSON."""
    path = f"{JOBS}/{segment(name)}"
    return Call("PATCH", path, _job, query={"namespace": namespace}, body=encode(changes))


def push_tasks(name: str, namespace: str, tasks: Iterable[Task | Mapping[str, Any]]) -> Call[PushedTasks]:
    """Return the call that pushes tasks to a stream. Each line of its body is one JSON object."""
    lines = [
        encode(task) if isinstance(task, Mapping) else task.model_dump_json(exclude_none=True).encode()
        for task in tasks
    ]
    return Call(
        "POST",
        f"{JOBS}/{segment(name)}/tasks",
        typed(PushedTasks),
        query={"namespace": namespace},
        body=b"\n".join(lines),
        content_type=NDJSON,
    )


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that a trainer gives a rollout.

    Attributes:
        components: Parts of the reward, which are delivered with the trajectory.
        reason: Why the reward is what it is, in CamelCase, for people.
        fence: The `fence` of the unscored trajectory. It is required in jobs with `maxPolicyLag` that restart
            stale rollouts, where another Run of the same rollout may wait by now.
    """

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class RewardsTaken:
    """What became of the rewards of one call."""

    accepted: int
    repeated: int
    """The rollouts that had just this reward already."""
    late: dict[str, str]
    """Why a reward is no longer needed, by the id of the rollout: it has ended without a reward for this
    reason, such as TargetMet, or it plays again (PlaysAgain)."""


def _is_finite(number: object) -> bool:
    """Return whether it is a finite number, or has one, as a tensor of one element."""
    try:
        return math.isfinite(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def rewards(name: str, namespace: str, rewards: Mapping[str, Reward | float]) -> Call[RewardsTaken]:
    """Return the call that gives rollouts their rewards. It may be sent again, because a repeat is harmless.

    Raises:
        Invalid: A reward or a component is not a finite number.
    """
    items: dict[str, Any] = {}
    for rollout, given in rewards.items():
        reward = given if isinstance(given, Reward) else Reward(given)
        numbers = {"reward": reward.reward, **reward.components}
        for part, number in numbers.items():
            # JSON has no form for NaN, so the server could only say that there is no number.
            if not _is_finite(number):
                raise Invalid(
                    f"the {part!r} of rollout {rollout!r} must be a finite number (got {number!r:.100})"
                )
        items[rollout] = {
            "reward": float(reward.reward),
            "components": {part: float(number) for part, number in reward.components.items()},
            "reason": reward.reason,
            "fence": reward.fence,
        }

    path = f"{JOBS}/{segment(name)}/rewards"
    body = encode({"rewards": items})
    return Call("POST", path, typed(RewardsTaken), query={"namespace": namespace}, body=body)


def put_job_status(name: str, namespace: str, status: RolloutJobStatus) -> Call[RolloutJob]:
    """Return the call with which a driver reports the status of a job."""
    path = f"{JOBS}/{segment(name)}/status"
    return Call("PUT", path, _job, query={"namespace": namespace}, body=encode(status.to_json()))


def unfinished(revision: int | None, wait: float) -> Call[UnfinishedJobs]:
    """Return the call that lists the jobs that have not ended.

    It waits up to `wait` seconds for an answer that differs from that of `revision`.
    """

    def parse(answer: httpx.Response) -> UnfinishedJobs:
        return crds.UnfinishedJobs.model_validate_json(answer.content)

    return Call("GET", "/v1/unfinished", parse, query={"revision": revision, "wait": wait}, wait=wait)
