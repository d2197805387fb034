"""Functions that build the calls of the REST API and say how their answers are read, without I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, as_json, encode, nothing, segment
from rollyard_client.workercalls import CLAIMS, claim_of

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
    from rollyard_crds.claims import Claim, ClaimList, ClaimStatus
    from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import Attempt, Trajectory
    from rollyard_crds.unfinished import UnfinishedJobs
    from rollyard_crds.weights import WeightUpdate, WeightUpdateRequest

NDJSON = "application/x-ndjson"
PARQUET = "application/vnd.apache.parquet"
JOBS = "/v1/rolloutjobs"
POOLS = "/v1/backendpools"

Manifest: TypeAlias = "RolloutJob | BackendPool | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a job's results: JSON lines, the cursor after them, and whether no more will follow."""

    lines: list[bytes]
    cursor: str
    finished: bool


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task that have a reward, as a GRPO or DAPO trainer needs them."""

    group_id: str
    task_id: str
    delivered: bool
    informative: bool
    reason: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """A summary of one rollout, which may have ended or not."""

    id: str
    task_id: str
    group_id: str
    sample_index: int
    stage: str | None
    status: str
    attempt: int
    reason: str
    message: str
    reward: float | None
    timings: dict[str, Any]
    worker: str
    backend: str
    attempts: list[Attempt] = field(default_factory=list)
    """What did not end well so far, oldest first; see `Trajectory.attempts`."""
    attempts_dropped: int = 0

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> RolloutSummary:
        """Return the summary that a server sent. Fields that this release does not know are left out."""
        known = {one.name: item[one.name] for one in fields(cls) if one.name in item}
        listed = [crds.Attempt.model_validate(entry) for entry in known.pop("attempts", [])]
        return cls(**known, attempts=listed)


def _job(answer: httpx.Response) -> RolloutJob:
    return crds.RolloutJob.model_validate_json(answer.content)


def _pool(answer: httpx.Response) -> BackendPool:
    return crds.BackendPool.model_validate_json(answer.content)


def _page(answer: httpx.Response) -> Page:
    lines = answer.content.split(b"\n")
    return Page(
        [line for line in lines if line],
        answer.headers["rollyard-cursor"],
        answer.headers["rollyard-finished"] == "true",
    )


def trajectory(line: bytes) -> Trajectory:
    """Return the Trajectory that a JSON line holds."""
    return crds.Trajectory.model_validate_json(line)


def group(line: bytes) -> Group:
    """Return the Group that a JSON line holds."""
    document = orjson.loads(line)
    members = [crds.Trajectory.model_validate(item) for item in document.pop("trajectories")]
    return Group(**document, trajectories=members)


def document_of(manifest: Manifest) -> Mapping[str, Any]:
    """Return the JSON form of a manifest, which is a model or a mapping. A model's status is left out."""
    if isinstance(manifest, Mapping):
        return manifest
    body = manifest.to_json()
    body.pop("status", None)
    return body


def submit(manifest: RolloutJob | Mapping[str, Any], timeout: float) -> Call[RolloutJob]:
    """Return the call that submits a job.

    The server may take `timeout` seconds beyond the usual timeout to read a large task list.
    """
    return Call("POST", JOBS, _job, body=encode(document_of(manifest)), wait=timeout)


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

    def parse(answer: httpx.Response) -> tuple[list[RolloutJob], str | None]:
        document = as_json(answer)
        found = [crds.RolloutJob.model_validate(item) for item in document["items"]]
        return found, document["metadata"].get("continue")

    query = {
        "namespace": namespace,
        "continue": after,
        "omit": "tasks" if bare else None,
        "finished": finished,
    }
    return Call("GET", JOBS, parse, query=query)


def job(name: str, namespace: str) -> Call[RolloutJob]:
    """Return the call that reads one job with its tasks and live counts."""
    return Call("GET", f"{JOBS}/{segment(name)}", _job, query={"namespace": namespace})


def _registered(manifest: RolloutJob | BackendPool) -> dict[str, Any]:
    """Return a manifest with the part of its metadata that the control plane keeps at a registration."""
    meta = manifest.metadata
    kept = crds.ObjectMeta(
        name=meta.name, namespace=meta.namespace, labels=meta.labels, annotations=meta.annotations
    )
    return {**document_of(manifest), "metadata": kept.to_json()}


def register_job(
    manifest: RolloutJob, tasks: Sequence[Task | Mapping[str, Any]] | None, timeout: float
) -> Call[RolloutJob]:
    """Return the call with which a driver registers a job.

    Args:
        manifest: The job.
        tasks: The tasks of its ConfigMap, if it has one.
        timeout: The seconds beyond the usual timeout that the server may take to read the tasks.
    """
    meta = manifest.metadata
    body: dict[str, Any] = {"manifest": _registered(manifest)}
    if tasks is not None:
        body["tasks"] = [
            task if isinstance(task, Mapping) else task.model_dump(mode="json", exclude_none=True)
            for task in tasks
        ]
    query = {"namespace": meta.namespace}
    return Call("PUT", f"{JOBS}/{segment(meta.name)}", _job, query=query, body=encode(body), wait=timeout)


def register_pool(manifest: BackendPool) -> Call[BackendPool]:
    """Return the call with which a driver registers a pool that has its home elsewhere."""
    meta, body = manifest.metadata, encode(_registered(manifest))
    return Call("PUT", f"{POOLS}/{segment(meta.name)}", _pool, query={"namespace": meta.namespace}, body=body)


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


def close(name: str, namespace: str) -> Call[RolloutJob]:
    """Return the call that closes a stream, which means that no more tasks will come."""
    return Call("POST", f"{JOBS}/{segment(name)}/close", _job, query={"namespace": namespace}, body=b"{}")


def patch(name: str, namespace: str, changes: Mapping[str, Any]) -> Call[RolloutJob]:
    """Return the call that changes fields of a job's spec, named as in JSON."""
    path = f"{JOBS}/{segment(name)}"
    return Call("PATCH", path, _job, query={"namespace": namespace}, body=encode(changes))


def push_tasks(name: str, namespace: str, tasks: Iterable[Task | Mapping[str, Any]]) -> Call[dict[str, int]]:
    """Return the call that pushes tasks to a stream. Each line of its body is one JSON object."""
    lines = [
        encode(task) if isinstance(task, Mapping) else task.model_dump_json(exclude_none=True).encode()
        for task in tasks
    ]
    return Call(
        "POST",
        f"{JOBS}/{segment(name)}/tasks",
        as_json,
        query={"namespace": namespace},
        body=b"\n".join(lines),
        content_type=NDJSON,
    )


def trajectories(
    name: str, namespace: str, *, cursor: str, wait: float, limit: int, status: str | None
) -> Call[Page]:
    """Return the call that reads a page of ended rollouts.

    Args:
        cursor: The cursor at which the page begins. An empty one begins at the first rollout.
        wait: The seconds that the server waits for the first item.
        limit: The largest number of items of the page.
        status: Return only rollouts that ended with this status. None selects all.
    """
    query = {"namespace": namespace, "cursor": cursor, "wait": wait, "limit": limit, "status": status}
    return Call("GET", f"{JOBS}/{segment(name)}/trajectories", _page, query=query, accept=NDJSON, wait=wait)


def parquet(name: str, namespace: str, *, cursor: str, limit: int) -> Call[tuple[bytes, str, bool]]:
    """Return the call that reads a Parquet file of up to `limit` trajectories.

    Its result is the file, the cursor after it, and whether nothing follows.
    """

    def parse(answer: httpx.Response) -> tuple[bytes, str, bool]:
        headers = answer.headers
        return answer.content, headers["rollyard-cursor"], headers["rollyard-finished"] == "true"

    query = {"namespace": namespace, "cursor": cursor, "limit": limit}
    return Call("GET", f"{JOBS}/{segment(name)}/trajectories", parse, query=query, accept=PARQUET)


def groups(
    name: str, namespace: str, *, cursor: str, wait: float, limit: int, informative: bool, dropped: bool
) -> Call[Page]:
    """Return the call that reads a page of ended groups. The other arguments are those of `trajectories`.

    Args:
        informative: Leave out the groups whose rewards are all equal.
        dropped: Include the groups of which too few rollouts survived.
    """
    query = {
        "namespace": namespace,
        "cursor": cursor,
        "wait": wait,
        "limit": limit,
        "informative": informative,
        "dropped": dropped,
    }
    return Call("GET", f"{JOBS}/{segment(name)}/groups", _page, query=query, accept=NDJSON, wait=wait)


def rollouts(
    name: str, namespace: str, *, stage: str | None, status: str | None, retried: bool, after: str | None
) -> Call[tuple[list[RolloutSummary], str | None]]:
    """Return the call that reads a page of summaries. `after` is the continuation of the last page."""

    def parse(answer: httpx.Response) -> tuple[list[RolloutSummary], str | None]:
        document = as_json(answer)
        return [RolloutSummary.of(item) for item in document["items"]], document["metadata"].get("continue")

    query: dict[str, Any] = {"namespace": namespace, "stage": stage, "status": status, "continue": after}
    if retried:
        query["retried"] = True
    return Call("GET", f"{JOBS}/{segment(name)}/rollouts", parse, query=query)


def rollout(name: str, namespace: str, rollout_id: str) -> Call[Trajectory]:
    """Return the call that reads the trajectory of one ended rollout."""

    def parse(answer: httpx.Response) -> Trajectory:
        return trajectory(answer.content)

    path = f"{JOBS}/{segment(name)}/rollouts/{segment(rollout_id)}"
    return Call("GET", path, parse, query={"namespace": namespace})


def events(name: str, namespace: str) -> tuple[str, dict[str, str]]:
    """Return the path and the query of a job's event stream."""
    return f"{JOBS}/{segment(name)}/events", {"namespace": namespace}


def put_job_status(name: str, namespace: str, status: RolloutJobStatus) -> Call[RolloutJob]:
    """Return the call with which a driver reports the status of a job."""
    path = f"{JOBS}/{segment(name)}/status"
    return Call("PUT", path, _job, query={"namespace": namespace}, body=encode(status.to_json()))


def create_pool(manifest: BackendPool | Mapping[str, Any]) -> Call[BackendPool]:
    """Return the call that creates a pool. Creating the same pool twice has no further effect."""
    return Call("POST", POOLS, _pool, body=encode(document_of(manifest)))


def pools(namespace: str | None) -> Call[list[BackendPool]]:
    """Return the call that lists the pools of a namespace. None selects all namespaces."""

    def parse(answer: httpx.Response) -> list[BackendPool]:
        return [crds.BackendPool.model_validate(item) for item in as_json(answer)["items"]]

    return Call("GET", POOLS, parse, query={"namespace": namespace})


def pool(name: str, namespace: str) -> Call[BackendPool]:
    """Return the call that reads one pool with its backends."""
    return Call("GET", f"{POOLS}/{segment(name)}", _pool, query={"namespace": namespace})


def patch_pool(name: str, namespace: str, spec: Mapping[str, Any]) -> Call[BackendPool]:
    """Return the call that changes a pool's spec by a merge patch (RFC 7386)."""
    path = f"{POOLS}/{segment(name)}"
    return Call("PATCH", path, _pool, query={"namespace": namespace}, body=encode({"spec": spec}))


def delete_pool(name: str, namespace: str) -> Call[None]:
    """Return the call that removes a pool."""
    path = f"{POOLS}/{segment(name)}"
    return Call("DELETE", path, nothing, query={"namespace": namespace}, idempotent=False)


def _update(answer: httpx.Response) -> WeightUpdate:
    return crds.WeightUpdate.model_validate_json(answer.content)


def update_weights(name: str, namespace: str, asked: WeightUpdateRequest) -> Call[WeightUpdate]:
    """Return the call that begins a weight update."""
    # The call is idempotent: the same version from the same source is answered with the existing update.
    path, body = f"{POOLS}/{segment(name)}/weights", encode(asked.to_json())
    return Call("POST", path, _update, query={"namespace": namespace}, body=body, wait=30.0)


def weight_updates(name: str, namespace: str) -> Call[list[WeightUpdate]]:
    """Return the call that lists a pool's weight updates, the newest first."""

    def parse(answer: httpx.Response) -> list[WeightUpdate]:
        return [crds.WeightUpdate.model_validate(item) for item in as_json(answer)["items"]]

    return Call("GET", f"{POOLS}/{segment(name)}/weights", parse, query={"namespace": namespace})


def weight_update(name: str, namespace: str, number: int, wait: float = 0.0) -> Call[WeightUpdate]:
    """Return the call that reads one weight update. It waits up to `wait` seconds for the update's end."""
    path = f"{POOLS}/{segment(name)}/weights/{number}"
    return Call("GET", path, _update, query={"namespace": namespace, "wait": wait}, wait=wait)


def pause_pool(name: str, namespace: str, mode: str, wait: float) -> Call[BackendPool]:
    """Return the call that pauses a pool. It waits up to `wait` seconds for the pool's servers."""
    query = {"namespace": namespace, "mode": mode, "wait": wait}
    return Call("POST", f"{POOLS}/{segment(name)}/pause", _pool, query=query, body=b"{}", wait=wait)


def resume_pool(name: str, namespace: str, wait: float) -> Call[BackendPool]:
    """Return the call that resumes a paused pool. It waits up to `wait` seconds for the pool's servers."""
    query = {"namespace": namespace, "wait": wait}
    return Call("POST", f"{POOLS}/{segment(name)}/resume", _pool, query=query, body=b"{}", wait=wait)


def put_backends(name: str, namespace: str, backends: Sequence[BackendStatus]) -> Call[BackendPool]:
    """Return the call with which a driver reports all backends of a pool."""
    body = encode({"backends": [backend.to_json() for backend in backends]})
    return Call("PUT", f"{POOLS}/{segment(name)}/backends", _pool, query={"namespace": namespace}, body=body)


def put_pool_status(name: str, namespace: str, status: BackendPoolStatus) -> Call[BackendPool]:
    """Return the call with which a driver reports the status of a pool."""
    path = f"{POOLS}/{segment(name)}/status"
    return Call("PUT", path, _pool, query={"namespace": namespace}, body=encode(status.to_json()))


def claims(namespace: str | None, revision: int | None, wait: float) -> Call[ClaimList]:
    """Return the call that lists sandbox claims.

    It waits up to `wait` seconds for an answer that differs from that of `revision`.
    """

    def parse(answer: httpx.Response) -> ClaimList:
        return crds.ClaimList.model_validate_json(answer.content)

    query = {"namespace": namespace, "revision": revision, "wait": wait}
    return Call("GET", CLAIMS, parse, query=query, wait=wait)


def unfinished(revision: int | None, wait: float) -> Call[UnfinishedJobs]:
    """Return the call that lists the jobs that have not ended.

    It waits up to `wait` seconds for an answer that differs from that of `revision`.
    """

    def parse(answer: httpx.Response) -> UnfinishedJobs:
        return crds.UnfinishedJobs.model_validate_json(answer.content)

    return Call("GET", "/v1/unfinished", parse, query={"revision": revision, "wait": wait}, wait=wait)


def put_claim_status(name: str, status: ClaimStatus) -> Call[Claim | None]:
    """Return the call that reports the state of a claim. Its result is None if the claim is gone."""

    def parse(answer: httpx.Response) -> Claim | None:
        return None if answer.status_code == 204 else claim_of(answer)

    body = status.model_dump_json().encode()
    return Call("PUT", f"{CLAIMS}/{segment(name)}/status", parse, body=body)


def ready() -> Call[None]:
    """Return the call that succeeds when the control plane is ready."""
    return Call("GET", "/readyz", nothing)
