"""The tables of the control plane's database.

Rollouts are narrow rows that change often. What is large and changes rarely (a task, a trajectory
between Run and Eval) is in tables of its own, because SQLite rewrites a whole row on every update.
Times are seconds since the epoch. JSON is kept as bytes, so it goes into a response without being
parsed. The columns of a table whose rows are read as a whole are the fields of its class in `rows`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from rollyard_api.machine import limits
from rollyard_api.machine.limits import Limits
from rollyard_api.machine.signs import Signs
from rollyard_api.machine.states import BY_NUMBER, RolloutState
from rollyard_api.storage.rows import BackendRow, BlobRow, ClaimRow, JobRow, PoolRow, WeightUpdateRow

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)


class StateNumber(sa.TypeDecorator[RolloutState]):
    """A RolloutState, stored as its number."""

    impl = sa.SmallInteger
    cache_ok = True

    def process_bind_param(self, value: RolloutState | None, dialect: Dialect) -> int | None:
        """Return the number of a state."""
        return None if value is None else int(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> RolloutState | None:
        """Return the state with a number."""
        return None if value is None else BY_NUMBER[value]


class LimitsJson(sa.TypeDecorator[Limits]):
    """The Limits of a job, stored as JSON."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Limits | None, dialect: Dialect) -> bytes | None:
        """Return limits as JSON."""
        return None if value is None else msgspec.json.encode(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Limits | None:
        """Return limits that were stored."""
        return None if value is None else limits.decoded(value)


class SignsJson(sa.TypeDecorator[Signs]):
    """The Signs of a job, stored as JSON."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Signs | None, dialect: Dialect) -> bytes | None:
        """Return signs as JSON."""
        return None if value is None else msgspec.json.encode(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Signs | None:
        """Return signs that were stored."""
        return None if value is None else msgspec.json.decode(value, type=Signs)


def _partial(name: str, *columns: str, where: str, unique: bool = False) -> sa.Index:
    clause = sa.text(where)
    return sa.Index(name, *columns, unique=unique, sqlite_where=clause, postgresql_where=clause)


_TYPES: dict[Any, type[sa.types.TypeEngine[Any]]] = {
    int: sa.Integer,
    float: sa.Double,
    bool: sa.Boolean,
    str: sa.Text,
    bytes: sa.LargeBinary,
    Limits: LimitsJson,
    Signs: SignsJson,
}


def _table(name: str, kind: type[Any], *constraints: sa.Constraint | sa.Index) -> sa.Table:
    """Return the table whose rows are of a class. Its columns are null where the fields may be None."""
    columns = []
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        kinds = get_args(hint) if NoneType in get_args(hint) else (hint,)
        stored = next(part for part in kinds if part is not NoneType)
        if get_origin(stored) is Annotated:
            stored = stored.__metadata__[0]
        else:
            stored = sa.String(16) if get_origin(stored) is Literal else _TYPES[stored]
        columns.append(sa.Column(field, stored, nullable=NoneType in kinds, default=defaults.get(field)))
    return sa.Table(name, metadata, *columns, *constraints)


jobs = _table(
    "jobs",
    JobRow,
    sa.PrimaryKeyConstraint("id"),
    sa.UniqueConstraint("uid"),
    _partial("uq_jobs_live_name", "namespace", "name", where="deleted_at IS NULL", unique=True),
    _partial("ix_jobs_unfinished", "id", where="finished_at IS NULL"),
    _partial("ix_jobs_blob", "blob_id", where="blob_id IS NOT NULL"),
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), primary_key=True),
    sa.Column("no", sa.Integer, primary_key=True),
    sa.Column("task_id", sa.String(128), nullable=False),
    sa.Column("task", sa.LargeBinary, nullable=False),
    sa.Column("backend", sa.Text),
    sa.Column("remaining", sa.Integer, nullable=False),
    # The place in the order in which the job's groups ended, or null while members are unfinished.
    sa.Column("seq", sa.Integer),
    sa.Column("delivered", sa.Boolean),
    sa.Column("informative", sa.Boolean),
    sa.Column("reason", sa.String(128)),
    sa.UniqueConstraint("job_id", "task_id"),
    _partial("ix_groups_seq", "job_id", "seq", where="seq IS NOT NULL"),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), nullable=False),
    sa.Column("group_no", sa.Integer, nullable=False),
    sa.Column("sample", sa.Integer, nullable=False),
    sa.Column("state", StateNumber, nullable=False),
    # While queued, the only node whose workers may lease it, or "" for any. While leased, the worker's node.
    sa.Column("node", sa.String(253), nullable=False),
    sa.Column("place", sa.BigInteger, nullable=False),
    sa.Column("token", sa.Integer, nullable=False, default=0),
    sa.Column("worker", sa.String(253)),
    sa.Column("lease_expires", sa.Double),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("failures_init", sa.SmallInteger, nullable=False, default=0),
    sa.Column("failures_run", sa.SmallInteger, nullable=False, default=0),
    sa.Column("failures_eval", sa.SmallInteger, nullable=False, default=0),
    sa.Column("expiries", sa.SmallInteger, nullable=False, default=0),
    sa.Column("eval_expiries", sa.SmallInteger, nullable=False, default=0),
    # How often an attempt that ended because the pool had no ready backend was not counted.
    sa.Column("outages", sa.SmallInteger, nullable=False, default=0),
    # The attempts that did not end well, as JSON ({"attempts", "dropped"}), or null if there are none.
    sa.Column("attempts", sa.LargeBinary),
    # The tokens whose outcome was accepted, by which a repeat is recognised: "c3" completed, "f2" failed.
    # "m3" means that the rollout was moved to another backend under that token, and "b3:HASH" that it has
    # blamed that backend under it.
    sa.Column("settled", sa.Text, nullable=False),
    sa.Column("timings", sa.Text, nullable=False),
    sa.Column("sandbox_id", sa.String(253)),
    sa.Column("sandbox", sa.LargeBinary),
    sa.Column("backend", sa.Text),
    # The pool's policy_index under which Run began, or null before Run.
    sa.Column("policy_index", sa.Integer),
    sa.Column("reward", sa.Double),
    sa.Column("components", sa.LargeBinary),
    sa.Column("reward_reason", sa.String(128)),
    sa.Column("reward_output", sa.Text),
    sa.Column("reason", sa.String(128)),
    sa.Column("message", sa.Text),
    # The place in the order in which the job's rollouts ended, which is the cursor of its trajectories.
    sa.Column("end_seq", sa.Integer),
    # This is 1 from the end of the rollout until its record is in the trajectory store.
    sa.Column("pending", sa.SmallInteger),
    sa.Column("part", sa.Integer),
    sa.Column("part_offset", sa.BigInteger),
    sa.Column("part_length", sa.Integer),
    # The tokens that the last complete Run sampled, or null before it.
    sa.Column("sampled_tokens", sa.Integer),
    # While it waits for the trainer's reward: its place in the order in which the job's rollouts began to
    # wait, which is the cursor of its unscored trajectories.
    sa.Column("unscored_seq", sa.Integer),
    sa.Index("ix_rollouts_queue", "job_id", "state", "node", "place"),
    sa.Index("ix_rollouts_group", "job_id", "group_no"),
    _partial(
        "ix_rollouts_lease", "lease_expires", "job_id", "state", "backend", where="lease_expires IS NOT NULL"
    ),
    _partial("ix_rollouts_end", "job_id", "end_seq", where="end_seq IS NOT NULL"),
    _partial("ix_rollouts_unscored", "job_id", "unscored_seq", where="unscored_seq IS NOT NULL"),
    _partial("ix_rollouts_sandbox", "sandbox_id", where="sandbox_id IS NOT NULL"),
    _partial("ix_rollouts_pending", "job_id", "end_seq", where="pending IS NOT NULL"),
)

# A row for each job with dynamic sampling. Groups with a number below `started` have rollouts; others wait.
dynamic_sampling = sa.Table(
    "dynamic_sampling",
    metadata,
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), primary_key=True, autoincrement=False),
    # The rollouts of each group.
    sa.Column("samples", sa.Integer, nullable=False),
    # The target number of informative groups in all steps together.
    sa.Column("target", sa.BigInteger, nullable=False),
    sa.Column("started", sa.Integer, nullable=False),
    sa.Column("informative", sa.Integer, nullable=False),
    sa.Column("uninformative", sa.Integer, nullable=False),
    sa.Column("dropped", sa.Integer, nullable=False),
    sa.Column("surplus", sa.Integer, nullable=False),
    sa.Column("surplus_rollouts", sa.Integer, nullable=False),
    sa.Column("discarded_tokens", sa.BigInteger, nullable=False),
)

# The steps that a trainer opened in a stream with dynamic sampling, each under an id of the trainer's choice.
sampling_targets = sa.Table(
    "sampling_targets",
    metadata,
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), primary_key=True, autoincrement=False),
    sa.Column("id", sa.String(128), primary_key=True),
    sa.Column("groups", sa.Integer, nullable=False),
    # The number of informative groups of the job with which this step is met.
    sa.Column("goal", sa.BigInteger, nullable=False),
    sa.Column("opened_at", sa.Double, nullable=False),
)

# The plugins that a job uses, with their text when it was submitted. They are removed with the job.
plugins = sa.Table(
    "plugins",
    metadata,
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), primary_key=True, autoincrement=False),
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("file", sa.String(100), nullable=False),
    # What it offers, as JSON.
    sa.Column("offers", sa.LargeBinary, nullable=False),
    # The text is a zlib stream.
    sa.Column("text", sa.LargeBinary, nullable=False),
)

# The cursors that the readers of a job's results acknowledge, each under a name of the reader's choice.
cursors = sa.Table(
    "cursors",
    metadata,
    sa.Column("job_id", sa.Integer, sa.ForeignKey("jobs.id"), primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(63), primary_key=True),
    # The kind is trajectories or groups.
    sa.Column("kind", sa.String(16), nullable=False),
    # The number of results that precede the cursor.
    sa.Column("position", sa.Integer, nullable=False),
    sa.Column("moved_at", sa.Double, nullable=False),
)

payloads = sa.Table(
    "payloads",
    metadata,
    sa.Column("rollout_id", sa.String(128), primary_key=True),
    sa.Column("carry", sa.LargeBinary),
    # What Run recorded: a Transcript as JSON, and separately its token lists in the form of `packed`.
    sa.Column("trajectory", sa.LargeBinary),
    sa.Column("segments", sa.LargeBinary),
    # Whether the leases of Eval carry the token lists.
    sa.Column("tokens_in_eval", sa.Boolean),
)

# Uploaded files. A row is visible to others once it is complete. An incomplete row that was last touched
# long ago is removed, piece by piece.
blobs = _table(
    "blobs",
    BlobRow,
    sa.PrimaryKeyConstraint("id"),
    sa.Index("ix_blobs_namespace", "namespace", "sha256"),
    _partial("uq_blobs_complete", "namespace", "sha256", where="complete", unique=True),
)

blob_pieces = sa.Table(
    "blob_pieces",
    metadata,
    sa.Column("blob_id", sa.Integer, primary_key=True),
    sa.Column("no", sa.Integer, primary_key=True),
    # The data is a zlib stream.
    sa.Column("data", sa.LargeBinary, nullable=False),
)

# When a worker of each node with sandboxes of its own last sent a request.
nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("name", sa.String(253), primary_key=True),
    sa.Column("heard_at", sa.Double, nullable=False),
)

# A claim outlives the rows of its rollout and job, because the driver must still remove its sandbox.
claims = _table("claims", ClaimRow, sa.PrimaryKeyConstraint("id"), sa.UniqueConstraint("rollout_id", "token"))

# The jobs that drivers offered to ready workers. A row outlives its offer, because it shows that the worker's
# token is spent.
assignments = sa.Table(
    "assignments",
    metadata,
    sa.Column("namespace", sa.String(63), primary_key=True),
    sa.Column("worker", sa.String(63), primary_key=True),
    sa.Column("job_id", sa.Integer, nullable=False),
    # The arguments of the worker, as a JSON list.
    sa.Column("arguments", sa.LargeBinary, nullable=False),
    sa.Column("offered_at", sa.Double, nullable=False),
    # When the worker fetched its assignment, or learned that the offer was withdrawn, or null before that.
    sa.Column("taken_at", sa.Double),
)

pools = _table(
    "pools",
    PoolRow,
    sa.PrimaryKeyConstraint("id"),
    sa.UniqueConstraint("uid"),
    sa.UniqueConstraint("namespace", "name"),
)

backends = _table(
    "backends",
    BackendRow,
    sa.PrimaryKeyConstraint("pool_id", "url"),
    sa.ForeignKeyConstraint(["pool_id"], ["pools.id"]),
)

weight_updates = _table(
    "weight_updates",
    WeightUpdateRow,
    sa.PrimaryKeyConstraint("id"),
    sa.ForeignKeyConstraint(["pool_id"], ["pools.id"]),
    sa.Index(None, "pool_id"),
)

# What the ProRL calls of a namespace have done: whether a batch is open, and its number.
prorl_state = sa.Table(
    "prorl_state",
    metadata,
    sa.Column("namespace", sa.String(63), primary_key=True),
    # The number of times that /start was called.
    sa.Column("batch", sa.Integer, nullable=False),
    sa.Column("running", sa.Boolean, nullable=False),
    # The uid of the pool that the calls made, or null if there is none.
    sa.Column("pool_uid", sa.String(36)),
)

# The jobs that the ProRL calls made. They reach no others. A row may outlive its job.
prorl_jobs = sa.Table(
    "prorl_jobs",
    metadata,
    sa.Column("job_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("namespace", sa.String(63), nullable=False, index=True),
    # The SHA-256 of the spec that the sampling parameters of its calls give.
    sa.Column("settings", sa.String(64), nullable=False),
)

# The /process calls of the last batch, by the SHA-256 of what the client calls job_id.
prorl_calls = sa.Table(
    "prorl_calls",
    metadata,
    sa.Column("namespace", sa.String(63), primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),
    # The SHA-256 of the instance and the parameters, which distinguishes a repeat from another call.
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("job_id", sa.Integer, nullable=False),
    sa.Column("rollout_id", sa.String(128), nullable=False),
    # The number of rollouts that were started for it.
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("cancelled", sa.Boolean, nullable=False),
    # Whether the client gave no job_id, so that nobody can ask for the result again.
    sa.Column("anonymous", sa.Boolean, nullable=False),
)


def _secrets(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """Return a table of secrets of the sign-in, none of which is kept.

    A row is found by the SHA-256 of its secret, and `proof` shows by which bearer token it was made. It is
    the HMAC-SHA-256 of `digest` under that token.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("digest", sa.String(64), primary_key=True),
        # The role of a session, viewer or admin. A code becomes such a session.
        sa.Column("role", sa.String(16), nullable=False),
        # The role of the token by which it was made.
        sa.Column("maker", sa.String(16), nullable=False),
        sa.Column("proof", sa.String(64), nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        *columns,
    )


sign_in_codes = _secrets("sign_in_codes")
# When a request last used the session; written only from time to time.
browser_sessions = _secrets("browser_sessions", sa.Column("used_at", sa.Double, nullable=False))

# The single row, with the number 1, has the name in which the cookies of this installation end.
installation = sa.Table(
    "installation",
    metadata,
    sa.Column("no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String(16), nullable=False),
)
