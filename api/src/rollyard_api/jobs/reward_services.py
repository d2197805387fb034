"""Requests to the reward services of jobs, within the installer's list and bounded in every way.

Workers do not send them. They may run anywhere, and only the control plane knows what the installer allows
and where a service can be reached from. An answer is reduced to numbers, so that nothing else in it reaches
the author of a job.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec
import sqlalchemy as sa
from msgspec import Meta, Struct
from rollyard_crds.fields.reward import MAX_COMPONENTS, RewardServiceSpec
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.trajectory import MAX_REWARD
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import dumps
from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import Conflict, Invalid, LimitReached, NotFound
from rollyard_api.jobs.allow_lists import AllowList
from rollyard_api.jobs.source_readers import Blocking, SourceUnreadable, exchange
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.schema import jobs, rollouts

MAX_ANSWER_BYTES: Final = 256 << 10
"""The largest answer of a service in bytes."""
CONNECT_SECONDS: Final = 10.0
WAIT_SECONDS: Final = 15.0
"""The longest wait in seconds for one of a job's own places. After it, the worker asks again."""
RESOLVERS: Final = 16
"""The number of threads that resolve the names of services."""
_RETRYABLE: Final = frozenset({408, 425, 429})
"""The answers with a status of 4xx after which another request may succeed."""


class ServiceAllowList(AllowList):
    """The reward services that the installer allows jobs to name. An empty list allows none."""

    __slots__ = ()
    schemes = ("http", "https")
    server = "the service"
    field = "spec.reward.service.url"
    refused = "RewardServiceNotAllowed"
    always = ()


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A request that a worker may make: the job's service, for a rollout whose Eval lease is held."""

    job_id: int
    namespace: str
    service: RewardServiceSpec


def service_of(conn: Connection, rollout: str, token: int) -> ServiceCall:
    """Return the service of a rollout's job.

    Raises:
        NotFound: There is no such rollout.
        Conflict: Its Eval lease is not held with this token, or its job has no service.
    """
    columns = (rollouts.c.token, rollouts.c.state, rollouts.c.job_id, jobs.c.namespace, jobs.c.limits)
    row = conn.execute(
        sa.select(*columns)
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(rollouts.c.id == rollout)
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout!r}", reason="RolloutNotFound")
    if row.token != token or row.state != RolloutState.LEASED_EVAL:
        raise Conflict(f"the Eval lease of {rollout!r} with token {token} is not held", reason="LeaseLost")
    service = row.limits.reward_service
    if service is None:
        raise Conflict(f"the job of {rollout!r} has no reward service", reason="NoRewardService")
    return ServiceCall(row.job_id, row.namespace, RewardServiceSpec.model_validate(service))


Number = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]


class ServiceScore(Struct):
    """The answer of a service. Its other fields are ignored."""

    reward: Number
    components: (
        Annotated[dict[Annotated[str, Meta(max_length=128)], Number], Meta(max_length=MAX_COMPONENTS)] | None
    ) = None


def _busy(_job: str | None, most: int) -> LimitReached:
    return LimitReached(
        f"{most} requests to the reward service are under way, as 'concurrency' says; ask again in a moment",
        reason="ServiceBusy",
        headers={"Retry-After": "1"},
    )


class RewardServices:
    """Sends episodes to reward services.

    Args:
        allowed: The installer's list.
    """

    def __init__(self, allowed: ServiceAllowList) -> None:
        self._allowed = allowed
        self._resolvers = ThreadPoolExecutor(RESOLVERS, thread_name_prefix="reward")
        self._jobs = Limit("requests to the reward service", seconds=WAIT_SECONDS, refusal=_busy)
        """The places that each job permits itself."""

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The context of all requests. It is read from the system once, which takes some milliseconds."""
        return ssl.create_default_context()

    def check(self, spec: RolloutJobSpec, namespace: str) -> None:
        """Check the service that a job names, if it names one, without connecting to it.

        Raises:
            Invalid: The installer's list does not contain it.
        """
        if spec.reward is not None and spec.reward.service is not None:
            self._allowed.source(spec.reward.service.url, namespace)

    async def ask(
        self,
        call: ServiceCall,
        episode: dict[str, Any],
        turn: Callable[[], AbstractAsyncContextManager[None]],
    ) -> dict[str, Any]:
        """Return the fields of a RewardResponse: the service's score, or why there is none.

        Args:
            call: The rollout's job and its service.
            episode: The JSON object to send.
            turn: Holds one of the places that all jobs share.

        Raises:
            LimitReached: The job's own places did not become free in time, or those that all jobs share.
        """
        body = dumps(episode)
        # A job's own place comes first: a request that waits for it must not hold a place that others need.
        async with self._jobs.turn(str(call.job_id), call.service.concurrency), turn():
            try:
                async with asyncio.timeout(call.service.timeout_seconds):
                    return _score(await self._answer(call, body))
            except TimeoutError:
                seconds = f"{call.service.timeout_seconds:g} s"
                return _failure(f"the service did not answer within {seconds}", retryable=True)
            except Invalid as error:
                return _failure(error.detail, retryable=False)
            except SourceUnreadable as error:
                return _failure(str(error), retryable=error.retryable)

    async def _answer(self, call: ServiceCall, body: bytes) -> bytes:
        source = self._allowed.source(call.service.url, call.namespace)
        blocking, seconds = Blocking(self._resolvers, lambda: None), call.service.timeout_seconds
        tls = self._tls if source.location.scheme == "https" else None
        most = (min(CONNECT_SECONDS, seconds), seconds)
        answer = bytearray()
        try:
            async with exchange(source, self._allowed, blocking, tls, seconds=most, body=body) as response:
                if response.status != 200:
                    raise _refused(response.status)
                async for data in response.aiter_stream():
                    answer += data
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise SourceUnreadable(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        finally:
            blocking.finish()
        return bytes(answer)

    def close(self) -> None:
        """Stop the threads without waiting for name servers that hang."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)


def _refused(status: int) -> SourceUnreadable:
    if 300 <= status < 400:
        # A redirect would lead to a place that the installer has not allowed.
        return SourceUnreadable(f"the service answered {status}; redirects are not followed", retryable=False)
    retryable = status >= 500 or status in _RETRYABLE
    return SourceUnreadable(f"the service answered {status}", retryable=retryable)


def _failure(why: str, *, retryable: bool) -> dict[str, Any]:
    return {"reward": None, "components": {}, "error": why[:1024], "retryable": retryable}


def _score(answer: bytes) -> dict[str, Any]:
    """Return the fields of a RewardResponse for a service's answer.

    Raises:
        SourceUnreadable: The answer is not a score.
    """
    try:
        score = msgspec.json.decode(answer, type=ServiceScore)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The messages of msgspec name fields and types of values, and quote nothing from the answer.
        why = error if isinstance(error, msgspec.MsgspecError) else type(error).__name__
        raise SourceUnreadable(f"its answer is not a score: {why}") from error
    return {"reward": score.reward, "components": score.components or {}, "error": "", "retryable": True}
