"""The calls of the sync client that read a job's results, one by one or in batches for a trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rollyard_client.call import Call
from rollyard_client.errors import RollyardError
from rollyard_client.requests import cursors, pools
from rollyard_client.requests.cursors import Acknowledged
from rollyard_client.requests.results import Group
from rollyard_client.training.batch import MODELS, RAW_ARRAYS, ArrayBatch, Batch, gather
from rollyard_client.training.iterators import ResultIterator
from rollyard_client.training.packed import ArrayPage, ArrayPages
from rollyard_client.training.pages import group_pages, resume_call, trajectory_pages
from rollyard_client.training.tokenizer import compare, vocabulary

if TYPE_CHECKING:
    from rollyard_crds.trajectory import Trajectory

    from rollyard_client.transport import SyncTransport

T = TypeVar("T")


class ResultReader:
    """The part of a client that reads the results of jobs."""

    namespace: str
    _transport: SyncTransport

    def trajectories(
        self,
        name: str,
        *,
        follow: bool = False,
        cursor: str = "",
        consumer: str | None = None,
        status: str | None = None,
        namespace: str | None = None,
    ) -> ResultIterator[Trajectory]:
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
        return ResultIterator(pages, self._transport.send, resume_call(name, where, cursor, consumer))

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
    ) -> ResultIterator[Group]:
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
        return ResultIterator(pages, self._transport.send, resume_call(name, where, cursor, consumer))

    def array_pages(
        self,
        name: str,
        *,
        cursor: str = "",
        status: str | None = None,
        namespace: str | None = None,
    ) -> Iterator[ArrayPage]:
        """Yield the ended rollouts in pages of up to 1,000, with their token lists as numpy arrays.

        Nothing on the way decodes the lists number by number, so this is the fastest way to many tokens. The
        last page ends with the last rollout that has ended by now.

        Args:
            cursor: The place at which to begin. An empty one begins with the first rollout.
            status: Yield only rollouts that ended with this status.

        Raises:
            MissingLibrary: numpy or msgpack is not installed.
        """
        pages = ArrayPages(name, namespace or self.namespace, status, cursor)
        while not pages.done:
            yield from pages.take(self._transport.send(pages.next()))

    def batch(
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
            max_lag: Leave out, and count, the groups of which a token was sampled with weights that are
                more than this many weight updates old. None leaves out none.
            cursor: The place at which to begin. None begins with the first group, or where `consumer` says.
            consumer: Begin at the cursor that was acknowledged under this name.
            informative: Leave out the groups whose rewards are all equal.
            timeout: How long to wait, in seconds. Groups that have ended already are read beyond that.
            namespace: The namespace of the job. None stands for the client's own.

        Raises:
            Invalid: An argument is wrong, or `max_lag` is given for a job without a pool.
            WaitTimeout: Not enough groups have ended in time. The next call begins with the same groups.
        """
        steps = gather(
            MODELS,
            job,
            namespace or self.namespace,
            groups,
            max_lag=max_lag,
            cursor=cursor,
            consumer=consumer,
            informative=informative,
            timeout=timeout,
        )
        return run(steps, self._transport)

    def array_batch(
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
            MissingLibrary: numpy or msgpack is not installed.
        """
        steps = gather(
            RAW_ARRAYS,
            job,
            namespace or self.namespace,
            groups,
            max_lag=max_lag,
            cursor=cursor,
            consumer=consumer,
            informative=informative,
            timeout=timeout,
        )
        return run(steps, self._transport)

    def acknowledge(
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
                (`CursorMoved`), it counts something else than the kept one (`CursorKindDiffers`), or the job
                has no room for another name (`TooManyCursors`).
            CursorGone: The cursor belongs to a job that was deleted.
        """
        where = namespace or self.namespace
        return self._transport.send(
            cursors.acknowledge(job, where, consumer, cursor, expected, rewind=rewind)
        )

    def acknowledged(self, job: str, namespace: str | None = None) -> list[Acknowledged]:
        """Return the cursors that were acknowledged for a job, ordered by name."""
        return self._transport.send(cursors.listed(job, namespace or self.namespace))

    def forget(self, job: str, consumer: str, namespace: str | None = None) -> None:
        """Remove an acknowledged cursor, or raise NotFound if there is none of this name."""
        self._transport.send(cursors.forget(job, namespace or self.namespace, consumer))

    def check_tokenizer(self, pool: str, tokenizer: Any, namespace: str | None = None) -> None:
        """Check, before the first step, that a pool and its trainer have tokenizers with the same ids.

        Their vocabularies are compared by a hash, including added tokens.

        Args:
            pool: The pool.
            tokenizer: The trainer's: a folder with tokenizer.json, the name of a model in Hugging Face's
                cache, or a tokenizer of transformers or of the tokenizers library.
            namespace: The namespace of the pool. None stands for the client's own.

        Raises:
            TokenizerDiffers: A token has another id, or only one of them has it.
            NotFound: The control plane does not see the pool's tokenizer (`TokenizerUnseen`).
            Invalid: One of the two is no tokenizer (`TokenizerInvalid`).
        """
        theirs = self._transport.send(pools.tokenizer(pool, namespace or self.namespace))
        compare(pool, theirs, vocabulary(tokenizer))


def run(steps: Generator[Call[Any], Any, T], transport: SyncTransport) -> T:
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
            answer = transport.send(call)
        except RollyardError as error:
            failed = error
