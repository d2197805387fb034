"""The rules of the routes: who may make which call.

A route without a rule is open to the admin alone. A route that is added later is therefore closed until its
rule is written, and a test fails until then. A token of one job may make only the calls of that job's
workers, and the routes check that every rollout, sandbox and claim in these calls belongs to that job. A
token of a ready worker may make a single call, which asks for that worker's assignment.

The token of one job reaches that job in its present form, its rollouts, its sandboxes and its claims.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, Literal

import sqlalchemy as sa
from rollyard_crds.security.job_token import JobIdentity
from sqlalchemy.engine import Connection
from starlette.routing import compile_path

from rollyard_api.access.bearer_tokens import Caller
from rollyard_api.core.problems import Forbidden
from rollyard_api.storage.database import Database
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.storage.statements import chunks

Stand = Literal["live", "finished", "gone"]
"""The state of a token's job: it has unfinished rollouts, all of its rollouts have ended, or it was
deleted or replaced."""
_ORDER: Final[tuple[Stand, ...]] = ("live", "finished", "gone")


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of a call, which says who may make it in addition to the admin."""

    roles: frozenset[str] = frozenset()
    until: Stand | None = None
    """The latest state of a job in which a token of its workers may make the call; None stands for never."""
    open: bool = False
    """Whether the call needs no token."""
    max_body: int | None = None
    """The largest number of bytes of the body, where the server's own bound is too high: a decoded body
    takes far more memory."""


OPEN: Final = Rule(open=True)
ADMIN: Final = Rule()
METRICS: Final = Rule(frozenset({"metrics"}))
DRIVER: Final = Rule(frozenset({"driver"}))
VIEW: Final = Rule(frozenset({"viewer"}))
"""The rule of read-only calls for people, which no program needs."""
READ: Final = Rule(frozenset({"driver", "viewer"}))
"""The rule of calls that change nothing and show nothing that a viewer may not see. Tasks have answers
and hidden tests, and blobs, claims and cursors belong to programs, so none of them has this rule."""
READY: Final = Rule(frozenset({"ready"}))
"""The rule of the only call of ready workers."""
WORK: Final = Rule(frozenset({"worker", "driver"}), "live")
LEARN: Final = Rule(frozenset({"worker", "driver"}), "finished")
"""The rule of calls by which a worker learns that its job has ended, or returns what it still has."""
REPORT: Final = Rule(frozenset({"worker", "driver"}), "gone")
"""The rule of reports of leases. They are judged by the rollout alone and must be answered however late
they arrive."""

TINY: Final = 4 << 10
SMALL: Final = 1 << 20
FAILURES: Final = 4 << 20
REWARDS: Final = 8 << 20
"""The number of bytes that the most rewards in one call may need, with all of their components."""
BEATS: Final = 16 << 20
"""The number of bytes that all leases and sandboxes in one heartbeat may need."""

EPISODE: Final = 32 << 20
"""The number of bytes that an episode for a reward service may need, however its texts are escaped."""

JOBS: Final = "/v1/rolloutjobs"
POOLS: Final = "/v1/backendpools"
BLOBS: Final = "/v1/blobs"

_PATHS: Final[dict[str, dict[str, Rule]]] = {
    "/healthz": {"GET": OPEN},
    "/readyz": {"GET": OPEN},
    "/metrics": {"GET": METRICS},
    "/docs": {"GET": VIEW},
    "/docs/{name}": {"GET": VIEW},
    "/openapi.json": {"GET": VIEW},
    "/v1/session": {"GET": VIEW, "POST": replace(OPEN, max_body=TINY), "DELETE": VIEW},
    "/v1/session/codes": {"POST": replace(VIEW, max_body=TINY)},
    "/v1/sessions": {"DELETE": VIEW},
    "/v1/leases": {"POST": replace(LEARN, max_body=SMALL)},
    "/v1/leases/job": {"GET": LEARN},
    "/v1/leases/images": {"GET": WORK},
    "/v1/leases/plugin": {"GET": WORK},
    "/v1/leases/route": {"POST": replace(WORK, max_body=SMALL)},
    "/v1/leases/reward": {"POST": replace(WORK, max_body=EPISODE)},
    "/v1/leases/heartbeat": {"POST": replace(REPORT, max_body=BEATS)},
    "/v1/leases/complete": {"POST": REPORT},
    "/v1/leases/fail": {"POST": replace(REPORT, max_body=FAILURES)},
    "/v1/claims": {"GET": DRIVER, "POST": replace(WORK, max_body=SMALL)},
    "/v1/claims/{claim}": {"GET": WORK, "DELETE": LEARN},
    "/v1/claims/{claim}/status": {"PUT": DRIVER},
    "/v1/unfinished": {"GET": DRIVER},
    "/v1/workers/died": {"POST": replace(DRIVER, max_body=SMALL)},
    "/v1/workers/offers": {"POST": replace(DRIVER, max_body=SMALL)},
    "/v1/workers/assignment": {"POST": replace(READY, max_body=SMALL)},
    JOBS: {"GET": READ, "POST": ADMIN},
    f"{JOBS}/{{name}}": {"GET": READ, "PUT": DRIVER, "PATCH": ADMIN, "DELETE": DRIVER},
    f"{JOBS}/{{name}}/tasks": {"GET": ADMIN, "POST": ADMIN},
    f"{JOBS}/{{name}}/targets": {"POST": replace(ADMIN, max_body=SMALL)},
    f"{JOBS}/{{name}}/close": {"POST": ADMIN},
    f"{JOBS}/{{name}}/cancel": {"POST": DRIVER},
    f"{JOBS}/{{name}}/status": {"PUT": DRIVER},
    f"{JOBS}/{{name}}/trajectories": {"GET": READ},
    f"{JOBS}/{{name}}/unscored": {"GET": READ},
    f"{JOBS}/{{name}}/rewards": {"POST": replace(ADMIN, max_body=REWARDS)},
    f"{JOBS}/{{name}}/groups": {"GET": READ},
    f"{JOBS}/{{name}}/events": {"GET": READ},
    f"{JOBS}/{{name}}/rollouts": {"GET": READ},
    f"{JOBS}/{{name}}/rollouts/{{rollout}}": {"GET": READ},
    f"{JOBS}/{{name}}/cursors": {"GET": ADMIN},
    f"{JOBS}/{{name}}/cursors/{{cursor}}": {
        "GET": ADMIN,
        "PUT": replace(ADMIN, max_body=SMALL),
        "DELETE": ADMIN,
    },
    f"{BLOBS}/{{sha256}}": {"GET": DRIVER, "PUT": ADMIN},
    "/v1/overview": {"GET": VIEW},
    "/v1/jobs": {"GET": VIEW},
    "/v1/workers/{name}/rollouts": {"GET": VIEW},
    "/v1/events": {"GET": VIEW},
    f"{JOBS}/{{name}}/grid": {"GET": VIEW},
    f"{JOBS}/{{name}}/gantt": {"GET": VIEW},
    f"{JOBS}/{{name}}/statistics": {"GET": VIEW},
    **{
        f"{JOBS}/{{name}}/rollouts/{{rollout}}/{piece}": {"GET": VIEW}
        for piece in ("brief", "messages", "messages/{number}", "tokens", "difference", "live")
    },
    POOLS: {"GET": READ, "POST": DRIVER},
    f"{POOLS}/{{name}}": {"GET": READ, "PUT": DRIVER, "PATCH": DRIVER, "DELETE": DRIVER},
    f"{POOLS}/{{name}}/tokenizer": {"GET": READ},
    f"{POOLS}/{{name}}/backends": {"PUT": DRIVER},
    f"{POOLS}/{{name}}/status": {"PUT": DRIVER},
    f"{POOLS}/{{name}}/pause": {"POST": DRIVER},
    f"{POOLS}/{{name}}/resume": {"POST": DRIVER},
    f"{POOLS}/{{name}}/weights": {"GET": READ, "POST": DRIVER},
    f"{POOLS}/{{name}}/weights/{{number}}": {"GET": READ},
}
RULES: Final = {(method, path): rule for path, rules in _PATHS.items() for method, rule in rules.items()}
"""The rule of each call, which is a method and a path."""
DOCS: Final = frozenset({"/docs", "/docs/{name}", "/openapi.json"})


class Access:
    """The rules, changed by what the installer makes public.

    Args:
        open_metrics: Whether `/metrics` needs no token.
        open_docs: Whether `/docs` and `/openapi.json` need no token.
    """

    def __init__(self, *, open_metrics: bool = False, open_docs: bool = False) -> None:
        opened = (DOCS if open_docs else frozenset()) | ({"/metrics"} if open_metrics else frozenset())
        rules = {key: OPEN if key[1] in opened else rule for key, rule in RULES.items()}
        self._exact = {key: rule for key, rule in rules.items() if "{" not in key[1]}
        self._shaped = [
            (method, compile_path(path)[0], rule) for (method, path), rule in rules.items() if "{" in path
        ]

    def rule(self, method: str, path: str) -> Rule:
        """Return the rule of a call, or that of the admin alone if there is none for the call."""
        method = "GET" if method == "HEAD" else method
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact
        for verb, pattern, rule in self._shaped:
            if verb == method and pattern.fullmatch(path):
                return rule
        return ADMIN


def authorize(rule: Rule, caller: Caller, method: str, path: str) -> None:
    """Check whether this caller may make this call, regardless of the objects that it names.

    Raises:
        Forbidden: The caller may not make the call.
    """
    if caller.role == "admin":
        return
    if caller.job is not None:
        if rule.until is None:
            raise Forbidden(f"the token of the workers of one job may not {method} {path}")
        return
    if caller.role not in rule.roles:
        raise Forbidden(f"the role '{caller.role}' may not {method} {path}")


def still(rule: Rule, stand: Stand) -> bool:
    """Return whether a token may still make the call while its job is in the state `stand`."""
    return rule.until is not None and _ORDER.index(stand) <= _ORDER.index(rule.until)


REMEMBERED: Final = 4096
"""The largest number of jobs that are remembered for their tokens."""


@dataclass(frozen=True, slots=True)
class BoundJob:
    """The job for which a token was made, and the state of that job."""

    identity: JobIdentity
    stand: Stand
    id: int | None
    """The id of the job's row, or None if the job is gone."""
    uid: str | None
    """The uid of the job itself, which claims carry, or None if the job is gone."""


_BOUND: Final = sa.select(jobs.c.id, jobs.c.uid, jobs.c.object_uid, jobs.c.finished_at).where(
    jobs.c.namespace == sa.bindparam("b_namespace"),
    jobs.c.name == sa.bindparam("b_name"),
    jobs.c.deleted_at.is_(None),
)


def look_up(conn: Connection, identity: JobIdentity) -> BoundJob:
    """Return the job of a token with its present state.

    The uid in the token may be that of the job or of the Kubernetes object for which the job is registered.
    """
    # A whole row holds the job's inline tasks, and replicas on PostgreSQL look it up for each request.
    job = conn.execute(_BOUND, {"b_namespace": identity.namespace, "b_name": identity.name}).one_or_none()
    if job is None or identity.uid not in (job.uid, job.object_uid):
        return BoundJob(identity, "gone", None, None)
    return BoundJob(identity, "live" if job.finished_at is None else "finished", job.id, job.uid)


class BoundJobs:
    """The jobs of the tokens in use.

    A job that was looked up is remembered until a commit changes a job, if the database can notice that (see
    `Database.job_changes`). A look that begins before such a commit counts for one request only.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[JobIdentity, tuple[int, BoundJob]] = {}

    async def of(self, identity: JobIdentity) -> BoundJob:
        """Return the job of a token with its present state; see `look_up`."""
        changes = self._database.job_changes
        known = self._known.get(identity)
        if known is not None and known[0] == changes:
            return known[1]
        job = await self._database.read(partial(look_up, identity=identity))
        if changes is not None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[identity] = (changes, job)
        return job


def of_other_job(bound: BoundJob) -> Forbidden:
    """Return the error for a token that is used for what belongs to another job."""
    who = bound.identity
    return Forbidden(f"this token is for the workers of job {who.namespace}/{who.name} only")


def refused(bound: BoundJob) -> Forbidden:
    """Return the error for a token whose job has ended."""
    who = bound.identity
    name = f"{who.namespace}/{who.name} with uid {who.uid}"
    how = "has ended" if bound.stand == "finished" else "was deleted, or replaced by another of its name"
    return Forbidden(f"this token was for the workers of job {name}, which {how}", reason="JobEnded")


@lru_cache(maxsize=256)
def _of_others(identity: JobIdentity, by: str) -> sa.Select[tuple[str]]:
    """Return the query for one rollout of a job that is not the token's own, even of a deleted job with rows.

    The query is kept because each report runs it.
    """
    # A job without an object has null here. Compared as null, it would match no job and pass the check.
    object_uid = sa.func.coalesce(jobs.c.object_uid, "")
    ours = sa.and_(
        jobs.c.namespace == identity.namespace,
        jobs.c.name == identity.name,
        sa.or_(jobs.c.uid == identity.uid, object_uid == identity.uid),
    )
    query = sa.select(rollouts.c.id).join(jobs, jobs.c.id == rollouts.c.job_id)
    named = rollouts.c[by].in_(sa.bindparam("b_names", expanding=True))
    return query.where(named, sa.not_(ours)).limit(1)


def reaches_others(
    conn: Connection, identity: JobIdentity, rollouts_of: Collection[str], sandboxes: Collection[str]
) -> bool:
    """Return whether one of these rollouts, or one that has one of these sandboxes, is of another job."""
    return any(
        conn.execute(_of_others(identity, by), {"b_names": names}).first() is not None
        for by, named in (("id", rollouts_of), ("sandbox_id", sandboxes))
        for names in chunks(sorted(named))
    )
