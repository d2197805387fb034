"""The async client of the control plane, from which `scripts/sync-client` makes the sync one."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

import rollyard_crds as crds

from rollyard_client import uploads
from rollyard_client.call import Call, Retry, Steps, ready
from rollyard_client.context import resolve
from rollyard_client.errors import Invalid, NotFound, RollyardError, WaitTimeout
from rollyard_client.finish import (
    FOLLOW_SECONDS,
    POLL_SECONDS,
    WAIT_SECONDS,
    check_same,
    deleted,
    finished,
    late,
    not_ended,
    stream_cut,
    update_timed_out,
)
from rollyard_client.paging import (
    Cursor,
    Files,
    Following,
    Listing,
    P,
    T,
    Walk,
    group_pages,
    trajectory_pages,
    unscored_pages,
)
from rollyard_client.requests import cursors, jobs, pools, results, sign_in, views
from rollyard_client.requests.cursors import Acknowledged
from rollyard_client.requests.jobs import OpenedTarget, PushedTasks, Reward, RewardsTaken
from rollyard_client.requests.results import Group, RolloutSummary, RunningRollout
from rollyard_client.requests.sign_in import PageRole, SignInCode
from rollyard_client.requests.views import (
    EVERY_ROLLOUT,
    FleetOverview,
    JobStatistics,
    RolloutQuery,
    RolloutRow,
)
from rollyard_client.sse import LAST_EVENTS, JobEvent, Parser
from rollyard_client.submission import GivenJob, GivenTasks, prepared
from rollyard_client.training.batch import MODELS, RAW_ARRAYS, ArrayBatch, Batch, BatchRequest, gather
from rollyard_client.training.packed import ArrayPage, ArrayPages
from rollyard_client.training.tokenizer import compare, vocabulary

if TYPE_CHECKING:
    from rollyard_crds.backendpool import BackendPool
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import Trajectory, UnscoredTrajectory
    from rollyard_crds.weights import LogprobReference, PauseMode, WeightUpdate

__all__ = ["AsyncClient", "AsyncResultIterator"]

M = TypeVar("M", bound="RolloutJob | BackendPool")
DEFAULT_TIMEOUT = 30.0
SUBMIT_SECONDS = 600.0


async def carried_out(send: Callable[[Call[Any]], Coroutine[Any, Any, Any]], steps: Steps[T]) -> T:
    """Send the calls that `steps` yields, make its pauses, and return what it returns."""
    answer: Any = None
    failed: RollyardError | None = None
    while True:
        try:
            step = steps.send(answer) if failed is None else steps.throw(failed)
        except StopIteration as end:
            return cast(T, end.value)
        answer, failed = None, None
        if isinstance(step, float):
            await asyncio.sleep(step)
            continue
        try:
            answer = await send(step)
        except RollyardError as error:
            failed = error


class AsyncResultIterator(AsyncIterator[T], Generic[T]):
    """An iterator of a job's results. It keeps its place if a call fails, so it can still be used."""

    def __init__(self, pages: Cursor[T], send: Callable[[Call[Any]], Coroutine[Any, Any, Any]]) -> None:
        self._pages = pages
        self._send = send

    @property
    def cursor(self) -> str:
        """The cursor after the last result that was returned.

        An iteration with this cursor begins with the result that follows. Before the first result, it is the
        cursor of the call, or empty.
        """
        return self._pages.cursor

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if not self._pages.waiting:
            await carried_out(self._send, self._pages.fetch())
            if not self._pages.waiting:
                raise StopAsyncIteration
        return self._pages.hand_out()


class AsyncClient:
    """A client of one control plane. All methods can raise RollyardError.

    Example::

        async with AsyncClient() as client:
            await client.submit("job.yaml", tasks="tasks.jsonl")
            async for trajectory in client.trajectories("job", follow=True):
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
        # The HTTP library is imported for the first client, because the import takes longer than all the
        # rest.
        from rollyard_client._async.transport import AsyncTransport

        self.namespace = namespace
        context = resolve(url, token, tls=tls)
        self._transport = AsyncTransport(context, retry=retry or Retry(), timeout=timeout)

    @property
    def url(self) -> str:
        """The control plane's address."""
        return self._transport.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._transport.close()

    async def _walk(self, pages: Walk[P, T]) -> AsyncIterator[T]:
        while not pages.done:
            for item in pages.take(await self._transport.send(pages.next())):
                yield item

    async def _run(self, steps: Steps[T]) -> T:
        return await carried_out(self._transport.send, steps)

    async def ready(self) -> None:
        """Return if the control plane is ready, and raise ServerUnavailable otherwise."""
        await self._transport.send(ready())

    async def submit(self, job: GivenJob, tasks: GivenTasks | None = None) -> RolloutJob:
        """Submit a RolloutJob, in the client's namespace if it names none, and return it.

        Submitting the same job with the same tasks twice has no further effect.

        Args:
            job: A model, its JSON form as a mapping, or the path of a YAML or JSON file. A file's own paths
                are relative to it, and what it names on this machine is uploaded.
            tasks: The tasks, if the job names none: the path of a task file, or of a folder of task folders
                (`format: harbor`), which is uploaded, or the tasks themselves. A short list becomes a part of
                the job, and a longer one is uploaded.

        Raises:
            Invalid: The job or a task is refused, or the job names other tasks already. `errors` names the
                fields, and the lines of a file.
            Conflict: There is another job of this name.
            OSError: A file cannot be read.
        """
        with await asyncio.to_thread(prepared, job, tasks, self.namespace) as submission:
            for name, file in submission.files.items():
                submission.uploaded(name, await self.upload(file.path, submission.namespace))
            try:
                return await self._transport.send(
                    jobs.submit(submission.document, self.namespace, SUBMIT_SECONDS)
                )
            except Invalid as error:
                raise submission.explained(error) from error

    async def upload(self, path: str | os.PathLike[str], namespace: str | None = None) -> str:
        """Upload a task file of any size and return its URL for `spec.tasks.url`.

        The file may be compressed. It belongs to the namespace, and it is not sent if the namespace has it
        already. The server removes it together with the last job that uses it. A file that no job uses is
        removed after an hour.

        Raises:
            OSError: The file cannot be read.
        """
        file = await asyncio.to_thread(uploads.hashed, Path(path))
        where = namespace or self.namespace
        try:
            await self._transport.send(uploads.has(file, where))
        except NotFound:
            await self._transport.send(uploads.put(file, where))
        return file.url

    async def jobs(self, namespace: str | None = None) -> list[RolloutJob]:
        """Return the jobs of a namespace, by default the client's own. `"*"` stands for all namespaces."""
        where = jobs.scope(namespace or self.namespace)
        return [job async for job in self._walk(Listing(partial(jobs.jobs, where)))]

    async def job(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Return one job with live counts."""
        return await self._transport.send(jobs.job(name, namespace or self.namespace))

    async def wait(self, name: str, timeout: float | None = None, namespace: str | None = None) -> RolloutJob:
        """Wait until the job has ended, and return it.

        Args:
            name: The job.
            timeout: How long to wait, in seconds. None stands for no limit.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            WaitTimeout: The job has not ended in time. The message says what it waits for.
            JobFailed: The job was deleted. One that failed or was cancelled is returned.
            JobReplaced: The job was deleted, and another one was submitted under its name.
        """
        uid: str | None = None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                job = await self.job(name, namespace)
            except NotFound as error:
                if uid is None:
                    raise
                raise deleted(name) from error
            check_same(job, uid)
            uid = job.metadata.uid
            if finished(job):
                return job
            left = POLL_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                meta = job.metadata
                await self._run(late(not_ended(job, timeout or 0.0), meta.name, meta.namespace))
            await asyncio.sleep(min(POLL_SECONDS, left))

    async def cancel(
        self, name: str, *, group: str | None = None, rollout: str | None = None, namespace: str | None = None
    ) -> RolloutJob:
        """Cancel a job, one of its groups, or one of its rollouts, and return the job."""
        target = {k: v for k, v in (("group", group), ("rollout", rollout)) if v is not None}
        return await self._transport.send(jobs.cancel(name, namespace or self.namespace, target))

    async def delete(self, name: str, namespace: str | None = None) -> None:
        """Cancel and remove a job. Stored trajectories stay in the trajectory store."""
        await self._transport.send(jobs.delete_job(name, namespace or self.namespace))

    async def update(
        self,
        name: str,
        *,
        suspend: bool | None = None,
        priority: int | None = None,
        namespace: str | None = None,
    ) -> RolloutJob:
        """Suspend a job, resume it, or change its priority, and return it."""
        changes = {k: v for k, v in (("suspend", suspend), ("priority", priority)) if v is not None}
        return await self._transport.send(jobs.patch(name, namespace or self.namespace, changes))

    async def replace(self, manifest: M) -> M:
        """Create a job or a pool, or give the one of this name another spec, and return it.

        Inline tasks of a job are left out of the answer. Only some fields can be changed.

        Raises:
            Conflict: A field differs that cannot be changed; `errors` names each.
        """
        if isinstance(manifest, crds.RolloutJob):
            call: Call[Any] = jobs.register_job(manifest, None, None, SUBMIT_SECONDS)
        else:
            call = pools.register_pool(manifest)
        return cast(M, await self._transport.send(call))

    async def push_tasks(
        self, name: str, tasks: Iterable[Task | Mapping[str, Any]], namespace: str | None = None
    ) -> PushedTasks:
        """Push tasks to a stream, and return how many of them were accepted and repeated."""
        return await self._transport.send(jobs.push_tasks(name, namespace or self.namespace, tasks))

    def unscored(
        self,
        name: str,
        *,
        wait: float = 0.0,
        follow: bool = False,
        timeout: float | None = FOLLOW_SECONDS,
        cursor: str = "",
        namespace: str | None = None,
    ) -> AsyncResultIterator[UnscoredTrajectory]:
        """Yield the rollouts that wait for the trainer's reward, in the order in which they began to wait.

        These are rollouts of a stream with `handler: unscored` and no function or service. `rewards` hands
        their rewards in. Without a cursor, all that still wait are yielded, so a trainer that was killed
        finds again what it has not scored.

        Args:
            name: The job.
            wait: How long to wait for the first one, in seconds, at most 60. The iteration is empty if none
                comes.
            follow: Wait for further ones until the job has ended.
            timeout: How long to wait for the next one if the job is followed, in seconds. None stands for no
                limit.
            cursor: The place at which to begin. An empty one begins with the first that waits.
            namespace: The namespace of the job. None stands for the client's own.
        """
        following = Following(name, namespace or self.namespace, follow, timeout, cursor)
        return AsyncResultIterator(unscored_pages(following, wait=wait), self._transport.send)

    async def rewards(
        self, name: str, rewards: Mapping[str, Reward | float], namespace: str | None = None
    ) -> RewardsTaken:
        """Give rollouts of `unscored` their rewards: all of them, or none if one of the rewards is refused.

        Handing in the same rewards again changes nothing. A reward whose rollout has ended without it, for
        example because the target of dynamic sampling is met, is not refused but listed as `late`.

        Args:
            name: The job.
            rewards: Up to 1,000 rewards, or numbers, by the ids of their rollouts.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Invalid: A reward is not a finite number from -1,000,000 to 1,000,000, or does not name the Run
                that it is for where it must.
            NotFound: The job has no such rollout.
            Conflict: A rollout has another reward already, or does not wait for one yet; `errors` names
                each.
        """
        return await self._transport.send(jobs.rewards(name, namespace or self.namespace, rewards))

    async def open_target(
        self, name: str, step: str, groups: int | None = None, *, namespace: str | None = None
    ) -> OpenedTarget:
        """Open a step of a stream with dynamic sampling, and return it.

        Opening the same step twice has no further effect.

        Args:
            name: The job.
            step: The id of the step, which the trainer chooses.
            groups: How many groups with a signal the step needs. None stands for the job's `targetGroups`.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Conflict: The job is not an open stream with dynamic sampling, or the step was opened with another
                number of groups.
        """
        return await self._transport.send(jobs.open_target(name, namespace or self.namespace, step, groups))

    async def close_stream(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Close a stream, which means that no more tasks will come, and return its job."""
        return await self._transport.send(jobs.close_stream(name, namespace or self.namespace))

    async def tasks(self, name: str, ids: Sequence[str], namespace: str | None = None) -> list[Task]:
        """Return the tasks of a job with these ids, at most 32.

        An unknown id is left out, and so are tasks beyond the size of a page: ask again for those.
        """
        return await self._transport.send(results.tasks(name, namespace or self.namespace, ids))

    async def trajectory(self, name: str, rollout: str, namespace: str | None = None) -> Trajectory:
        """Return the trajectory of one ended rollout."""
        return await self._transport.send(results.rollout(name, namespace or self.namespace, rollout))

    async def running_rollout(self, name: str, rollout: str, namespace: str | None = None) -> RunningRollout:
        """Return a rollout that has not ended, as far as it has come, with the turn that is being sampled.

        Raises:
            Conflict: It has ended; `trajectory` returns its record.
        """
        return await self._transport.send(results.running_rollout(name, namespace or self.namespace, rollout))

    def rollouts(
        self,
        name: str,
        *,
        stage: str | None = None,
        status: str | None = None,
        retried: bool = False,
        namespace: str | None = None,
    ) -> AsyncIterator[RolloutSummary]:
        """Yield the summaries of all rollouts, ended or not, ordered by id.

        With `retried`, only those with an attempt that did not end well are yielded.
        """
        where = namespace or self.namespace
        build = partial(results.rollouts, name, where, stage=stage, status=status, retried=retried)
        return self._walk(Listing(lambda after: build(after=after)))

    def rollout_rows(
        self, name: str, query: RolloutQuery = EVERY_ROLLOUT, namespace: str | None = None
    ) -> AsyncIterator[RolloutRow]:
        """Yield short rows of the rollouts that `query` selects, in its order."""
        build = partial(views.rollout_rows, name, namespace or self.namespace, query)
        return self._walk(Listing(build))

    async def statistics(self, name: str, namespace: str | None = None) -> JobStatistics:
        """Return the statistics that are kept of a job: rewards, versions, failures, stages and time."""
        return await self._transport.send(views.statistics(name, namespace or self.namespace))

    async def overview(self) -> FleetOverview:
        """Return an overview of the fleet: jobs by phase, queues, rates, pools, nodes and workers."""
        return await self._transport.send(views.overview())

    def parquet(self, name: str, *, cursor: str = "", namespace: str | None = None) -> AsyncIterator[bytes]:
        """Yield the job's ended rollouts as Parquet files of up to 1,000 rows each."""
        build = partial(results.parquet, name, namespace or self.namespace, limit=1000)
        return self._walk(Files(lambda at: build(cursor=at), cursor))

    async def events(
        self,
        name: str,
        *,
        last_id: str = "",
        timeout: float | None = FOLLOW_SECONDS,
        namespace: str | None = None,
    ) -> AsyncIterator[JobEvent]:
        """Yield stage transitions and counts as they happen, until the job has ended.

        Args:
            name: The job.
            last_id: The id of the event after which to continue.
            timeout: How long to wait for the next event, in seconds. None stands for no limit.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            JobFailed: The job was deleted.
            WaitTimeout: No event has come in time. The message says what the job waits for.
            ServerUnavailable: The stream was cut. To continue, give the last event's id.
        """
        where = namespace or self.namespace
        path, query = results.events(name, where)
        parser = Parser()
        waited = time.monotonic()
        async with self._transport.stream(path, query, last_id) as answer:
            # Without an event there is a line several times a second.
            async for line in answer.aiter_lines():
                for event in parser.feed(line):
                    yield event
                    if event.name in LAST_EVENTS:
                        return
                    waited = time.monotonic()
                if timeout is not None and time.monotonic() - waited > timeout:
                    text = f"RolloutJob {name!r}: no further event within {timeout:g} s"
                    await self._run(late(text, name, where))
        await self._run(stream_cut(name, where))

    async def sign_in_code(self, role: PageRole = "viewer") -> SignInCode:
        """Make a one-time code that signs a browser in to the page, and return it."""
        return await self._transport.send(sign_in.make_code(role))

    async def page_prefix(self) -> str:
        """Return the path below which browsers find the page, or "" for the root."""
        return await self._transport.send(sign_in.prefix())

    async def end_sessions(self) -> int:
        """End the page's sessions and return their number: all, or those of a viewer's own token."""
        return await self._transport.send(sign_in.end_all())

    async def create_pool(self, manifest: BackendPool | Mapping[str, Any]) -> BackendPool:
        """Create a BackendPool and return it. Creating the same pool twice has no further effect."""
        return await self._transport.send(pools.create_pool(manifest, self.namespace))

    async def pools(self, namespace: str | None = None) -> list[BackendPool]:
        """Return the pools of a namespace, by default the client's own. `"*"` stands for all namespaces."""
        return await self._transport.send(pools.pools(jobs.scope(namespace or self.namespace)))

    async def pool(self, name: str, namespace: str | None = None) -> BackendPool:
        """Return one pool with its backends."""
        return await self._transport.send(pools.pool(name, namespace or self.namespace))

    async def patch_pool(
        self, name: str, spec: Mapping[str, Any], namespace: str | None = None
    ) -> BackendPool:
        """Change a pool's spec by a merge patch (RFC 7386), such as `{"replicas": 3}`, and return the pool.

        The model, the tokenizer and the engine's type cannot be changed.
        """
        return await self._transport.send(pools.patch_pool(name, namespace or self.namespace, spec))

    async def delete_pool(self, name: str, namespace: str | None = None) -> None:
        """Remove a pool."""
        await self._transport.send(pools.delete_pool(name, namespace or self.namespace))

    async def update_weights(
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

        Call `wait_weights` to wait until it has ended.

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
            Invalid: `lora` is not a pair of texts.
            Conflict: The version already names other weights, a server cannot do what is asked, or `pushed`
                is given for a pool that has no backend.
        """
        request = crds.WeightUpdateRequest.model_validate(
            {
                "policy_version": policy_version,
                "source": {
                    "checkpoint": None if checkpoint is None else {"path": checkpoint},
                    "lora": pools.adapter(lora),
                    "pushed": pushed,
                },
                "mode": mode,
                "in_flight": in_flight,
                "reference": reference,
                "require_verified": require_verified,
            }
        )
        return await self._transport.send(pools.update_weights(pool, namespace or self.namespace, request))

    async def weight_updates(self, pool: str, namespace: str | None = None) -> list[WeightUpdate]:
        """Return a pool's weight updates, the newest first."""
        return await self._transport.send(pools.weight_updates(pool, namespace or self.namespace))

    async def wait_weights(
        self, pool: str, update: int, timeout: float | None = None, namespace: str | None = None
    ) -> WeightUpdate:
        """Wait until a weight update has ended, and return it. Its `state` says how it ended.

        Raises:
            WaitTimeout: The update still runs after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SECONDS if end is None else max(0.0, end - time.monotonic())
            call = pools.weight_update(
                pool, namespace or self.namespace, update, wait=min(WAIT_SECONDS, left)
            )
            answer = await self._transport.send(call)
            if answer.state != "Running":
                return answer
            if left <= 0:
                raise WaitTimeout(update_timed_out(answer, pool, timeout or 0.0))

    async def pause_pool(
        self, pool: str, mode: PauseMode = "abort", *, wait: float = 30.0, namespace: str | None = None
    ) -> BackendPool:
        """Pause a pool and return it.

        No rollout enters the stage Run, and the servers sample nothing, until `resume_pool` is called.
        """
        return await self._transport.send(pools.pause_pool(pool, namespace or self.namespace, mode, wait))

    async def resume_pool(
        self, pool: str, *, wait: float = 30.0, namespace: str | None = None
    ) -> BackendPool:
        """Resume a pool after `pause_pool`."""
        return await self._transport.send(pools.resume_pool(pool, namespace or self.namespace, wait))

    def trajectories(
        self,
        name: str,
        *,
        follow: bool = False,
        timeout: float | None = FOLLOW_SECONDS,
        cursor: str = "",
        consumer: str | None = None,
        status: str | None = None,
        namespace: str | None = None,
    ) -> AsyncResultIterator[Trajectory]:
        """Yield the ended rollouts in the order in which they ended.

        The iterator's `cursor` is the place after the last one, from which a later call can continue.

        Args:
            name: The job.
            follow: Wait for further ones until the job has ended.
            timeout: With `follow`, how long to wait for the next one, in seconds. Time in which other
                rollouts end does not count. None stands for no limit.
            cursor: The place at which to begin. An empty one begins with the first rollout.
            consumer: Begin at the cursor that was acknowledged under this name.
            status: Yield only rollouts that ended with this status.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Invalid: An argument is wrong.
            JobFailed: The job is followed, and has failed, or was cancelled or deleted. All rollouts that had
                ended were yielded.
            WaitTimeout: The job is followed, and no rollout has ended in time. The message says what the job
                waits for, and the iterator can still be used.
        """
        following = Following(name, namespace or self.namespace, follow, timeout, cursor, consumer)
        return AsyncResultIterator(trajectory_pages(following, status=status), self._transport.send)

    def groups(
        self,
        name: str,
        *,
        follow: bool = False,
        informative: bool = False,
        dropped: bool = False,
        timeout: float | None = FOLLOW_SECONDS,
        cursor: str = "",
        consumer: str | None = None,
        namespace: str | None = None,
    ) -> AsyncResultIterator[Group]:
        """Yield whole groups in the order in which they ended.

        The iterator's `cursor` is the place after the last one, from which a later call can continue. The
        errors are those of `trajectories`.

        Args:
            name: The job.
            follow: Wait for further groups until the job has ended.
            timeout: With `follow`, how long to wait for the next group, in seconds. Time in which other
                groups end does not count. None stands for no limit.
            informative: Leave out the groups whose rewards are all equal.
            dropped: Include the groups of which too few rollouts survived.
            cursor: The place at which to begin. An empty one begins with the first group.
            consumer: Begin at the cursor that was acknowledged under this name.
            namespace: The namespace of the job. None stands for the client's own.
        """
        following = Following(name, namespace or self.namespace, follow, timeout, cursor, consumer)
        pages = group_pages(following, informative=informative, dropped=dropped)
        return AsyncResultIterator(pages, self._transport.send)

    def array_pages(
        self,
        name: str,
        *,
        cursor: str = "",
        status: str | None = None,
        namespace: str | None = None,
    ) -> AsyncIterator[ArrayPage]:
        """Yield the ended rollouts in pages of up to 1,000, with their token lists as numpy arrays.

        Nothing on the way decodes the lists number by number, so this is the fastest way to read many tokens.
        The last page ends with the last rollout that has ended by now.

        Args:
            cursor: The place at which to begin. An empty one begins with the first rollout.
            status: Yield only rollouts that ended with this status.

        Raises:
            RollyardError: numpy or msgpack is not installed.
        """
        return self._walk(ArrayPages(name, namespace or self.namespace, status, cursor))

    async def batch(
        self,
        job: str,
        groups: int,
        *,
        max_lag: int | None = None,
        cursor: str | None = None,
        consumer: str | None = None,
        informative: bool = False,
        timeout: float = 600.0,
        namespace: str | None = None,
    ) -> Batch:
        """Wait for the next groups of a job, and return them as one batch.

        The call changes nothing on the server. To move on, keep `Batch.cursor` in a checkpoint, or
        acknowledge it.

        Args:
            job: The job.
            groups: How many groups the batch has. It has fewer only if the job has succeeded with fewer.
            max_lag: Leave out, and count, the groups that have a token sampled with weights that are more
                than this many weight updates old. None leaves out none.
            cursor: The place at which to begin. None begins with the first group, or where `consumer` says.
            consumer: Begin at the cursor that was acknowledged under this name.
            informative: Leave out the groups whose rewards are all equal.
            timeout: How long to wait, in seconds. Groups that have already ended are read even after that.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Invalid: An argument is wrong, or `max_lag` is given for a job without a pool.
            JobFailed: The job has failed, or was cancelled or deleted, before enough groups had ended.
            WaitTimeout: Not enough groups have ended in time. The message says what the job waits for, and
                the next call begins with the same groups.
        """
        request = BatchRequest(
            job=job,
            groups=groups,
            max_lag=max_lag,
            cursor=cursor,
            consumer=consumer,
            informative=informative,
            timeout=timeout,
            namespace=namespace or self.namespace,
        )
        return await self._run(gather(MODELS, request))

    async def array_batch(
        self,
        job: str,
        groups: int,
        *,
        max_lag: int | None = None,
        cursor: str | None = None,
        consumer: str | None = None,
        informative: bool = False,
        timeout: float = 600.0,
        namespace: str | None = None,
    ) -> ArrayBatch:
        """Wait for the next groups of a job, and return them as one batch, with numpy arrays of tokens.

        The arguments, the cursors and the errors are those of `batch`, which costs several times as much
        where trajectories are long.

        Raises:
            RollyardError: numpy or msgpack is not installed.
        """
        request = BatchRequest(
            job=job,
            groups=groups,
            max_lag=max_lag,
            cursor=cursor,
            consumer=consumer,
            informative=informative,
            timeout=timeout,
            namespace=namespace or self.namespace,
        )
        return await self._run(gather(RAW_ARRAYS, request))

    async def acknowledge(
        self,
        job: str,
        consumer: str,
        cursor: str,
        *,
        expected: str | None = None,
        rewind: bool = False,
        namespace: str | None = None,
    ) -> Acknowledged:
        """Let the server keep a cursor under a name, from which `consumer=` resumes.

        A repeat with the same cursor changes nothing. The server keeps up to 64 names for a job, and removes
        them together with the job.

        Args:
            job: The job.
            consumer: The name: letters, digits, `.`, `_` and `-`, at most 63.
            cursor: The cursor of an iterator or a batch of this job.
            expected: The cursor that it replaces, such as `Batch.start`, or "" for none. None stands for
                whichever is kept.
            rewind: Whether the cursor may move backwards.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Conflict: The cursor would move backwards (`CursorBehind`), another reader has moved it
                (`CursorMoved`), it counts something other than the kept one (`CursorKindDiffers`), or the job
                has no room for another name (`TooManyCursors`).
            JobReplaced: The cursor belongs to a job that was deleted.
        """
        where = namespace or self.namespace
        return await self._transport.send(
            cursors.acknowledge(job, where, consumer, cursor, expected, rewind=rewind)
        )

    async def acknowledged(self, job: str, namespace: str | None = None) -> list[Acknowledged]:
        """Return the cursors that were acknowledged for a job, ordered by name."""
        return await self._transport.send(cursors.listed(job, namespace or self.namespace))

    async def forget(self, job: str, consumer: str, namespace: str | None = None) -> None:
        """Remove an acknowledged cursor, or raise NotFound if there is none with this name."""
        await self._transport.send(cursors.forget(job, namespace or self.namespace, consumer))

    async def check_tokenizer(self, pool: str, tokenizer: Any, namespace: str | None = None) -> None:
        """Check, before the first step, that the tokenizers of a pool and its trainer have the same ids.

        Their vocabularies are compared by a hash, including added tokens.

        Args:
            pool: The pool.
            tokenizer: The trainer's: a folder with tokenizer.json, the name of a model in Hugging Face's
                cache, or a tokenizer of transformers or of the tokenizers library.
            namespace: The namespace of the pool. None stands for the client's own.

        Raises:
            TokenizerDiffers: A token has another id, or only one of them has it.
            NotFound: The control plane does not see the pool's tokenizer (`TokenizerUnseen`).
            Invalid: One of the two is not a tokenizer (`TokenizerInvalid`).
        """
        theirs = await self._transport.send(pools.tokenizer(pool, namespace or self.namespace))
        compare(pool, theirs, await asyncio.to_thread(vocabulary, tokenizer))
