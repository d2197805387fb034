"""The async client of the control plane, from which `scripts/sync-client` makes the sync one."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, cast

import rollyard_crds as crds

from rollyard_client import uploads
from rollyard_client.call import Call, Retry, ready
from rollyard_client.context import resolve
from rollyard_client.errors import NotFound, RollyardError, WaitTimeout
from rollyard_client.finish import (
    POLL_SECONDS,
    WAIT_SECONDS,
    check_same,
    finished,
    timed_out,
    update_timed_out,
)
from rollyard_client.paging import (
    Cursor,
    Files,
    Listing,
    P,
    T,
    Walk,
    begin_at,
    group_pages,
    resume_call,
    trajectory_pages,
    unscored_pages,
)
from rollyard_client.requests import cursors, jobs, pools, results, sign_in, views
from rollyard_client.requests.cursors import Acknowledged
from rollyard_client.requests.jobs import Reward, RewardsTaken
from rollyard_client.requests.results import Group, RolloutSummary, RunningRollout
from rollyard_client.requests.sign_in import PageRole, SignInCode
from rollyard_client.requests.views import EVERY_ROLLOUT, RolloutQuery, RolloutRow
from rollyard_client.sse import JobEvent, Parser
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

DEFAULT_TIMEOUT = 30.0
SUBMIT_SECONDS = 600.0


class AsyncResultIterator(AsyncIterator[T], Generic[T]):
    """An iterator of a job's results. It keeps its place if a call fails, so it can still be used."""

    def __init__(
        self,
        pages: Cursor[T],
        send: Callable[[Call[Any]], Coroutine[Any, Any, Any]],
        resume: Call[Acknowledged] | None,
    ) -> None:
        self._pages = pages
        self._send = send
        self._resume = resume

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
        if self._resume is not None:
            try:
                self._pages.cursor = (await self._send(self._resume)).cursor
            except NotFound as error:
                self._pages.cursor = begin_at(error)
            self._resume = None
        while not self._pages.waiting:
            if self._pages.done:
                raise StopAsyncIteration
            self._pages.take(await self._send(self._pages.next()))
        return self._pages.hand_out()


class AsyncClient:
    """A client of one control plane. All methods can raise RollyardError.

    Example::

        async with AsyncClient() as client:
            job = await client.submit(manifest)
            async for trajectory in client.trajectories("quickstart", follow=True):
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
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. The client cannot be used afterwards."""
        await self._transport.close()

    async def _walk(self, pages: Walk[P, T]) -> AsyncIterator[T]:
        while not pages.done:
            for item in pages.take(await self._transport.send(pages.next())):
                yield item

    async def _run(self, steps: Generator[Call[Any], Any, T]) -> T:
        """Send the calls that `steps` yields, and return what it returns."""
        answer: Any = None
        failed: RollyardError | None = None
        while True:
            try:
                call = steps.send(answer) if failed is None else steps.throw(failed)
            except StopIteration as end:
                return cast(T, end.value)
            answer, failed = None, None
            try:
                answer = await self._transport.send(call)
            except RollyardError as error:
                failed = error

    async def ready(self) -> None:
        """Return if the control plane is ready, and raise ServerUnavailable otherwise."""
        await self._transport.send(ready())

    async def submit(self, manifest: RolloutJob | Mapping[str, Any]) -> RolloutJob:
        """Submit a RolloutJob, in the client's namespace if its manifest names none, and return it.

        Submitting the same job twice has no further effect.
        """
        return await self._transport.send(jobs.submit(manifest, self.namespace, SUBMIT_SECONDS))

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
        """Return all jobs of a namespace, or of all namespaces if none is given."""
        return [job async for job in self._walk(Listing(partial(jobs.jobs, namespace)))]

    async def job(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Return one job with live counts."""
        return await self._transport.send(jobs.job(name, namespace or self.namespace))

    async def wait(self, name: str, timeout: float | None = None, namespace: str | None = None) -> RolloutJob:
        """Wait until the job has ended, and return it.

        Raises:
            WaitTimeout: The job has not ended within `timeout` seconds.
            JobReplaced: The job was deleted, and another one was submitted under its name.
        """
        uid: str | None = None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            job = await self.job(name, namespace)
            check_same(job, uid)
            uid = job.metadata.uid
            if finished(job):
                return job
            left = POLL_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                raise WaitTimeout(timed_out(job, timeout or 0.0))
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

    async def push_tasks(
        self, name: str, tasks: Iterable[Task | Mapping[str, Any]], namespace: str | None = None
    ) -> dict[str, int]:
        """Push tasks to a stream and return the counts of `accepted` and `repeated` tasks."""
        return await self._transport.send(jobs.push_tasks(name, namespace or self.namespace, tasks))

    def unscored(
        self,
        name: str,
        *,
        follow: bool = False,
        wait: float = 0.0,
        cursor: str = "",
        namespace: str | None = None,
    ) -> AsyncResultIterator[UnscoredTrajectory]:
        """Yield the rollouts that wait for the trainer's reward, in the order in which they began to wait.

        These are rollouts of a stream with `handler: unscored` and no function or service. `rewards` hands
        their rewards in. Without a cursor, all that still wait are yielded, so a trainer that was killed
        finds again what it has not scored.

        Args:
            name: The job.
            follow: Wait for further ones until the job has ended.
            wait: How long to wait for the first one, in seconds, at most 60.
            cursor: The place at which to begin. An empty one begins with the first that waits.
            namespace: The namespace of the job. None stands for the client's own.
        """
        pages = unscored_pages(name, namespace or self.namespace, follow=follow, wait=wait, cursor=cursor)
        return AsyncResultIterator(pages, self._transport.send, None)

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
    ) -> dict[str, Any]:
        """Open a step of a stream with dynamic sampling, and return its `goal` and whether it is `met`.

        Opening the same step twice has no further effect.

        Args:
            name: The job.
            step: The id of the step, which the trainer chooses.
            groups: How many groups with a signal the step needs. None stands for the job's `targetGroups`.
            namespace: The namespace of the job. None stands for the client's own.

        Returns:
            `id`, `groups`, `goal` (the step is met when the job has this many groups with a signal), `met`
            and `opened` (whether this call opened it).

        Raises:
            Conflict: The job is not an open stream with dynamic sampling, or the step was opened with another
                number of groups.
        """
        return await self._transport.send(jobs.open_target(name, namespace or self.namespace, step, groups))

    async def close(self, name: str, namespace: str | None = None) -> RolloutJob:
        """Close a stream, which means that no more tasks will come, and return its job."""
        return await self._transport.send(jobs.close(name, namespace or self.namespace))

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

    async def statistics(self, name: str, namespace: str | None = None) -> dict[str, Any]:
        """Return the statistics that are kept of a job: rewards, versions, failures, stages and time."""
        return await self._transport.send(views.statistics(name, namespace or self.namespace))

    async def overview(self) -> dict[str, Any]:
        """Return an overview of the fleet: jobs by phase, queues, rates, pools, nodes and workers."""
        return await self._transport.send(views.overview())

    def parquet(self, name: str, *, cursor: str = "", namespace: str | None = None) -> AsyncIterator[bytes]:
        """Yield the job's ended rollouts as Parquet files of up to 1,000 rows each."""
        build = partial(results.parquet, name, namespace or self.namespace, limit=1000)
        return self._walk(Files(lambda at: build(cursor=at), cursor))

    async def events(
        self, name: str, *, last_id: str = "", namespace: str | None = None
    ) -> AsyncIterator[JobEvent]:
        """Yield stage transitions and counts as they happen, until the job has ended."""
        path, query = results.events(name, namespace or self.namespace)
        parser = Parser()
        async with self._transport.stream(path, query, last_id) as answer:
            async for line in answer.aiter_lines():
                for event in parser.feed(line):
                    yield event
                    if event.name == "end":
                        return

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
        """Return all pools of a namespace, or of all namespaces if none is given."""
        return await self._transport.send(pools.pools(namespace))

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
        cursor: str = "",
        consumer: str | None = None,
        status: str | None = None,
        namespace: str | None = None,
    ) -> AsyncResultIterator[Trajectory]:
        """Yield the ended rollouts in the order in which they ended.

        The iterator's `cursor` is the place after the last one, from which a later call can continue.

        Args:
            follow: Wait for further ones until the job has ended.
            cursor: The place at which to begin. An empty one begins with the first rollout.
            consumer: Begin at the cursor that was acknowledged under this name.
            status: Yield only rollouts that ended with this status.
        """
        where = namespace or self.namespace
        pages = trajectory_pages(name, where, follow=follow, cursor=cursor, status=status)
        return AsyncResultIterator(pages, self._transport.send, resume_call(name, where, cursor, consumer))

    def groups(
        self,
        name: str,
        *,
        follow: bool = False,
        informative: bool = False,
        dropped: bool = False,
        cursor: str = "",
        consumer: str | None = None,
        namespace: str | None = None,
    ) -> AsyncResultIterator[Group]:
        """Yield whole groups in the order in which they ended.

        The iterator's `cursor` is the place after the last one, from which a later call can continue.

        Args:
            follow: Wait for further groups until the job has ended.
            informative: Leave out the groups whose rewards are all equal.
            dropped: Include the groups of which too few rollouts survived.
            cursor: The place at which to begin. An empty one begins with the first group.
            consumer: Begin at the cursor that was acknowledged under this name.
        """
        where = namespace or self.namespace
        pages = group_pages(
            name, where, follow=follow, cursor=cursor, informative=informative, dropped=dropped
        )
        return AsyncResultIterator(pages, self._transport.send, resume_call(name, where, cursor, consumer))

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
            groups: How many groups the batch has. It has fewer only if no more will follow.
            max_lag: Leave out, and count, the groups that have a token sampled with weights that are more
                than this many weight updates old. None leaves out none.
            cursor: The place at which to begin. None begins with the first group, or where `consumer` says.
            consumer: Begin at the cursor that was acknowledged under this name.
            informative: Leave out the groups whose rewards are all equal.
            timeout: How long to wait, in seconds. Groups that have already ended are read even after that.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Invalid: An argument is wrong, or `max_lag` is given for a job without a pool.
            WaitTimeout: Not enough groups have ended in time. The next call begins with the same groups.
        """
        request = BatchRequest(
            job, groups, max_lag, cursor, consumer, informative, timeout, namespace or self.namespace
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
            job, groups, max_lag, cursor, consumer, informative, timeout, namespace or self.namespace
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
