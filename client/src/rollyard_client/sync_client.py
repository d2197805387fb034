"""The sync client of the control plane."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import rollyard_crds as crds

from rollyard_client import uploads
from rollyard_client.call import Retry, ready
from rollyard_client.context import resolve
from rollyard_client.errors import NotFound, WaitTimeout
from rollyard_client.finish import (
    POLL_SECONDS,
    WAIT_SECONDS,
    check_same,
    finished,
    timed_out,
    update_timed_out,
)
from rollyard_client.paging import Files, Listing, P, T, Walk
from rollyard_client.requests import jobs, pools, results, sign_in, views, weights
from rollyard_client.requests.results import RolloutSummary
from rollyard_client.requests.sign_in import PageRole, SignInCode
from rollyard_client.requests.views import EVERY_ROLLOUT, RolloutQuery, RolloutRow
from rollyard_client.sse import JobEvent, Parser
from rollyard_client.training.sync_reader import ResultReader

if TYPE_CHECKING:
    from rollyard_crds.backendpool import BackendPool
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import Trajectory
    from rollyard_crds.weights import LogprobReference, PauseMode, WeightUpdate

__all__ = ["Client"]

DEFAULT_TIMEOUT = 30.0
SUBMIT_SECONDS = 600.0


class Client(ResultReader):
    """A client of one control plane. All methods can raise RollyardError.

    Example::

        with Client() as client:
            job = client.submit(manifest)
            for trajectory in client.trajectories("quickstart", follow=True):
                print(trajectory.id, trajectory.reward)

    Args:
        url: The control plane's address. The default is ROLLYARD_URL, or else the address in the context
            file that `rollyard up` writes.
        token: The bearer token. The default is ROLLYARD_TOKEN, or else the token of the context file.
        namespace: The namespace of all calls that name none.
        timeout: The seconds that a request may take; a long poll may take its own wait in addition.
        retry: How failed calls are repeated; the default is `Retry()`.
        tls: The authorities to trust for `https:`. The default is ROLLYARD_CA_FILE or SSL_CERT_FILE, or
            else the usual public authorities.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = DEFAULT_TIMEOUT,
        retry: Retry | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # The HTTP library is imported for the first client, because that takes longer than all the rest.
        from rollyard_client.transport import SyncTransport

        self.namespace = namespace
        context = resolve(url, token, tls=tls)
        self._transport = SyncTransport(context, retry=retry or Retry(), timeout=timeout)

    @property
    def url(self) -> str:
        """The control plane's address."""
        return self._transport.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_connections()

    def close_connections(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        self._transport.close()

    def _walk(self, pages: Walk[P, T]) -> Iterator[T]:
        while not pages.done:
            yield from pages.take(self._transport.send(pages.next()))

    def ready(self) -> None:
        """Return if the control plane is ready, and raise ServerUnavailable otherwise."""
        self._transport.send(ready())

    def submit(self, manifest: RolloutJob | Mapping[str, Any]) -> RolloutJob:
        """Submit a RolloutJob and return it, in the client's namespace if its manifest names none.

        Submitting the same job twice has no further effect.
        """
        return self._transport.send(jobs.submit(manifest, self.namespace, SUBMIT_SECONDS))

    def upload(self, path: str | os.PathLike[str], namespace: str | None = None) -> str:
        """Upload a task file of any size and return its URL for `spec.tasks.url`.

        The file may be compressed. It belongs to the namespace, and it is not sent if the namespace has it
        already. The server removes it together with the last job that uses it. A file that no job uses is
        removed after an hour.

        Raises:
            OSError: The file cannot be read.
        """
        file = uploads.hashed(Path(path))
        where = namespace or self.namespace
        try:
            self._transport.send(uploads.has(file, where))
        except NotFound:
            self._transport.send(uploads.put(file, where))
        return file.url

    def jobs(self, namespace: str | None = None) -> list[RolloutJob]:
        """Return all jobs of a namespace, or of all namespaces if none is given."""
        return list(self._walk(Listing(partial(jobs.jobs, namespace))))

    def job(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Return one job with live counts."""
        return self._transport.send(jobs.job(name, namespace or self.namespace))

    def wait(self, name: str, timeout: float | None = None, namespace: str | None = None) -> RolloutJob:
        """Wait until the job has ended, and return it.

        Raises:
            WaitTimeout: The job has not ended within `timeout` seconds.
            JobReplaced: The job was deleted, and another one was submitted under its name.
        """
        uid: str | None = None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            job = self.job(name, namespace)
            check_same(job, uid)
            uid = job.metadata.uid
            if finished(job):
                return job
            left = POLL_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                raise WaitTimeout(timed_out(job, timeout or 0.0))
            time.sleep(min(POLL_SECONDS, left))

    def cancel(
        self, name: str, *, group: str | None = None, rollout: str | None = None, namespace: str | None = None
    ) -> RolloutJob:
        """Cancel a job, one of its groups, or one of its rollouts, and return the job."""
        target = {k: v for k, v in (("group", group), ("rollout", rollout)) if v is not None}
        return self._transport.send(jobs.cancel(name, namespace or self.namespace, target))

    def delete(self, name: str, namespace: str | None = None) -> None:
        """Cancel and remove a job. Stored trajectories stay in the trajectory store."""
        self._transport.send(jobs.delete_job(name, namespace or self.namespace))

    def update(
        self,
        name: str,
        *,
        suspend: bool | None = None,
        priority: int | None = None,
        namespace: str | None = None,
    ) -> RolloutJob:
        """Suspend a job, resume it, or change its priority, and return it."""
        changes = {k: v for k, v in (("suspend", suspend), ("priority", priority)) if v is not None}
        return self._transport.send(jobs.patch(name, namespace or self.namespace, changes))

    def push_tasks(
        self, name: str, tasks: Iterable[Task | Mapping[str, Any]], namespace: str | None = None
    ) -> dict[str, int]:
        """Push tasks to a stream and return the counts of `accepted` and `repeated` tasks."""
        return self._transport.send(jobs.push_tasks(name, namespace or self.namespace, tasks))

    def open_target(
        self, name: str, step: str, groups: int | None = None, *, namespace: str | None = None
    ) -> dict[str, Any]:
        """Open a step of a stream with dynamic sampling, and return its `goal` and whether it is `met`.

        Opening the same step twice has no further effect.

        Args:
            name: The job.
            step: The id of the step, which the trainer chooses.
            groups: How many groups with a signal the step wants. None stands for the job's `targetGroups`.
            namespace: The namespace of the job. None stands for the client's own.

        Returns:
            `id`, `groups`, `goal` (the step is met when the job has this many groups with a signal), `met`
            and `opened` (whether this call opened it).

        Raises:
            Conflict: The job is no open stream with dynamic sampling, or the step was opened with another
                number of groups.
        """
        return self._transport.send(jobs.open_target(name, namespace or self.namespace, step, groups))

    def close(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Close a stream, which means that no more tasks will come, and return its job."""
        return self._transport.send(jobs.close(name, namespace or self.namespace))

    def tasks(self, name: str, ids: Sequence[str], namespace: str | None = None) -> list[Task]:
        """Return the tasks of a job with these ids, at most 32.

        An unknown id is left out, and so are tasks beyond the bytes of a page: ask again for those.
        """
        return self._transport.send(results.tasks(name, namespace or self.namespace, ids))

    def trajectory(self, name: str, rollout: str, namespace: str | None = None) -> Trajectory:
        """Return the trajectory of one ended rollout."""
        return self._transport.send(results.rollout(name, namespace or self.namespace, rollout))

    def rollouts(
        self,
        name: str,
        *,
        stage: str | None = None,
        status: str | None = None,
        retried: bool = False,
        namespace: str | None = None,
    ) -> Iterator[RolloutSummary]:
        """Yield the summaries of all rollouts, ended or not, ordered by id.

        With `retried`, only those with an attempt that did not end well are yielded.
        """
        where = namespace or self.namespace
        build = partial(results.rollouts, name, where, stage=stage, status=status, retried=retried)
        return self._walk(Listing(lambda after: build(after=after)))

    def rollout_rows(
        self, name: str, asked: RolloutQuery = EVERY_ROLLOUT, namespace: str | None = None
    ) -> Iterator[RolloutRow]:
        """Yield short rows of the rollouts that `asked` selects, in its order."""
        build = partial(views.rollout_rows, name, namespace or self.namespace, asked)
        return self._walk(Listing(build))

    def statistics(self, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Return the statistics that are kept of a job: rewards, versions, failures, stages and time."""
        return self._transport.send(views.statistics(name, namespace or self.namespace))

    def overview(self) -> dict[str, Any]:
        """Return the fleet at a glance: jobs by phase, queues, rates, pools, nodes and workers."""
        return self._transport.send(views.overview())

    def parquet(self, name: str, *, cursor: str = "", namespace: str | None = None) -> Iterator[bytes]:
        """Yield the job's ended rollouts as Parquet files of up to 1,000 rows each."""
        build = partial(results.parquet, name, namespace or self.namespace, limit=1000)
        return self._walk(Files(lambda at: build(cursor=at), cursor))

    def events(self, name: str, *, last_id: str = "", namespace: str | None = None) -> Iterator[JobEvent]:
        """Yield stage transitions and counts as they happen, until the job has ended."""
        path, query = results.events(name, namespace or self.namespace)
        parser = Parser()
        with self._transport.stream(path, query, last_id) as answer:
            for line in answer.iter_lines():
                for event in parser.feed(line):
                    yield event
                    if event.name == "end":
                        return

    def sign_in_code(self, role: PageRole = "viewer") -> SignInCode:
        """Make a one-time code that signs a browser in to the page, and return it."""
        return self._transport.send(sign_in.make_code(role))

    def page_prefix(self) -> str:
        """Return the path below which browsers find the page, or "" for the root."""
        return self._transport.send(sign_in.prefix())

    def end_sessions(self) -> int:
        """End the page's sessions, and return their number: all, or those of a viewer's own token."""
        return self._transport.send(sign_in.end_all())

    def create_pool(self, manifest: BackendPool | Mapping[str, Any]) -> BackendPool:
        """Create a BackendPool and return it. Creating the same pool twice has no further effect."""
        return self._transport.send(pools.create_pool(manifest, self.namespace))

    def pools(self, namespace: str | None = None) -> list[BackendPool]:
        """Return all pools of a namespace, or of all namespaces if none is given."""
        return self._transport.send(pools.pools(namespace))

    def pool(self, name: str, namespace: str | None = None) -> BackendPool:
        """Return one pool with its backends."""
        return self._transport.send(pools.pool(name, namespace or self.namespace))

    def patch_pool(self, name: str, spec: Mapping[str, Any], namespace: str | None = None) -> BackendPool:
        """Change a pool's spec by a merge patch (RFC 7386), such as `{"replicas": 3}`, and return the pool.

        The model, the tokenizer and the engine's type cannot be changed.
        """
        return self._transport.send(pools.patch_pool(name, namespace or self.namespace, spec))

    def delete_pool(self, name: str, namespace: str | None = None) -> None:
        """Remove a pool."""
        self._transport.send(pools.delete_pool(name, namespace or self.namespace))

    def update_weights(
        self,
        pool: str,
        policy_version: str,
        *,
        checkpoint: str | None = None,
        lora: tuple[str, str] | Mapping[str, str] | None = None,
        pushed: bool = False,
        mode: PauseMode = "abort",
        in_flight: Literal["continue", "restart"] = "continue",
        reference: LogprobReference | Mapping[str, Any] | None = None,
        require_verified: bool = False,
        namespace: str | None = None,
    ) -> WeightUpdate:
        """Begin to update every backend of a pool to new weights, and return the update at once.

        Call `wait_weights` to wait for its end.

        Args:
            checkpoint: A model folder that the servers can read.
            lora: The name of an adapter and its folder, as a pair or as `name` and `path`.
            pushed: The weights are in the servers already.
            mode: What happens to requests in flight: `abort`, `wait` or `keep`.
            in_flight: Whether rollouts in the stage Run continue from their tokens or start again.
            reference: Log-probabilities of a prompt under the new weights, which the servers are verified
                against.

        Raises:
            pydantic.ValidationError: Not exactly one source is given, or a field is wrong.
            Invalid: `lora` is no pair of texts.
            Conflict: The version names other weights already, a server cannot do what is asked, or `pushed`
                is given for a pool that has no backend.
        """
        asked = crds.WeightUpdateRequest.model_validate(
            {
                "policy_version": policy_version,
                "source": {
                    "checkpoint": None if checkpoint is None else {"path": checkpoint},
                    "lora": weights.adapter(lora),
                    "pushed": pushed,
                },
                "mode": mode,
                "in_flight": in_flight,
                "reference": reference,
                "require_verified": require_verified,
            }
        )
        return self._transport.send(weights.update_weights(pool, namespace or self.namespace, asked))

    def weight_updates(self, pool: str, namespace: str | None = None) -> list[WeightUpdate]:
        """Return a pool's weight updates, the newest first."""
        return self._transport.send(weights.weight_updates(pool, namespace or self.namespace))

    def wait_weights(
        self, pool: str, update: int, timeout: float | None = None, namespace: str | None = None
    ) -> WeightUpdate:
        """Wait until a weight update has ended, and return it. Its `state` says how it ended.

        Raises:
            WaitTimeout: The update still runs after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SECONDS if end is None else max(0.0, end - time.monotonic())
            call = weights.weight_update(
                pool, namespace or self.namespace, update, wait=min(WAIT_SECONDS, left)
            )
            found = self._transport.send(call)
            if found.state != "Running":
                return found
            if left <= 0:
                raise WaitTimeout(update_timed_out(found, pool, timeout or 0.0))

    def pause_pool(
        self, pool: str, mode: PauseMode = "abort", *, wait: float = 30.0, namespace: str | None = None
    ) -> BackendPool:
        """Pause a pool and return it.

        No rollout enters the stage Run, and the servers sample nothing, until `resume_pool` is called.
        """
        return self._transport.send(pools.pause_pool(pool, namespace or self.namespace, mode, wait))

    def resume_pool(self, pool: str, *, wait: float = 30.0, namespace: str | None = None) -> BackendPool:
        """Resume a pool after `pause_pool`."""
        return self._transport.send(pools.resume_pool(pool, namespace or self.namespace, wait))
