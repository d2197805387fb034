"""The database, with one writer that uses group commit, and a few readers that each have a snapshot.

Changes are functions `op(tx) -> result`. The writer thread takes all waiting ops, runs them in one
transaction and answers each only after the commit, so one fsync serves many requests. If any op fails,
the transaction is rolled back and each op is run again alone. Ops therefore use nothing but the connection,
and record in `tx` what is to be announced after the commit.

SQLite runs in WAL mode. What a caller was promised (a job, tasks, a result) is committed with
synchronous=FULL, so it is on disk before it is answered, and survives a power cut. Group commit
makes the fsync cheap enough. A transaction whose ops are all `durable=False` (leases, heartbeats,
expiry) uses NORMAL. It survives a killed process as well, but perhaps not a power cut, after which the
rollout is leased again.

Every replica of a PostgreSQL control plane has a writer of its own. Rows are locked, and after a
deadlock the op is run again.

Before it is opened, the state folder is locked, and `upgrade` brings the schema up to date. An empty database
gets the tables that `schema.metadata` describes, and the revision of the last migration. A migration
therefore only changes a database that an earlier release has made.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import sqlalchemy as sa
from rollyard_process.telemetry.spans import TraceSpan
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, RootTransaction, make_url
from sqlalchemy.exc import DBAPIError

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.problems import ApiError, Conflict, StorageFull, Unavailable
from rollyard_api.storage import view_tables  # noqa: F401  It adds tables to the metadata.
from rollyard_api.storage.schema import metadata

if TYPE_CHECKING:
    from alembic.config import Config

T = TypeVar("T")

MAX_GROUP: Final = 64
"""The largest number of ops in one transaction."""
MAX_WAITING: Final = 10_000
"""The largest number of ops that wait for the writer, and of queries for a reader. More are answered 503."""
MAX_RETRIES: Final = 8
"""How often one op is tried again after a deadlock or a serialization failure."""
READERS: Final = 2
_MIGRATIONS: Final = Path(__file__).parent / "migrations"
_MIGRATION_LOCK: Final = 7_382_946_110
"""The key of a PostgreSQL advisory lock. If several replicas start at once, one migrates, others wait."""

Measured = tuple[str, int, float, float]
"""The measurements of a completed Run: backend, sampled tokens, seconds of model time, seconds of Run."""


class StageTrouble(NamedTuple):
    """A stage that did not end well while a worker had it."""

    job_id: int
    worker: str
    rollout: str
    reason: str
    message: str


@dataclass(slots=True)
class Transaction:
    """What one op is given: the connection, the time, and lists of what to announce after the commit."""

    conn: Connection
    now: float
    sqlite: bool
    wakes: set[str] = field(default_factory=set)
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    counted: list[tuple[str, tuple[str, ...], float]] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)
    """The spans that end with this transaction; see `trajectories.traces`."""
    trace_sample: float = 0.0
    """The fraction of groups whose rollouts are traced; 0 if nothing is."""
    measured: list[Measured] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)
    """The active rollouts by backend, if this transaction counted them."""
    troubles: list[StageTrouble] = field(default_factory=list)

    def wake(self, *topics: str) -> None:
        """Make long polls on these topics check again after the commit."""
        self.wakes.update(topics)

    def emit(self, job_id: int, **data: Any) -> None:
        """Add a stage transition to the job's event stream."""
        self.events.append((job_id, data))

    def count(self, metric: str, *labels: str, value: float = 1.0) -> None:
        """Add to a counter, or observe a value, under these labels."""
        self.counted.append((metric, labels, value))


AfterCommit = Callable[[Sequence[Transaction]], None]


@dataclass(slots=True)
class _Query(Generic[T]):
    query: Callable[[Connection], T]
    future: asyncio.Future[T]
    result: T | None = None


@dataclass(slots=True)
class _Waiting(Generic[T]):
    op: Callable[[Transaction], T]
    future: asyncio.Future[T]
    durable: bool
    tx: Transaction | None = None
    result: T | None = None


def _sqlite_engine(url: URL, max_pages: int, *, writer: bool) -> Engine:
    engine = sa.create_engine(
        url,
        pool_size=1 if writer else READERS,
        max_overflow=0,
        # This module begins the transactions (see _begin), because sqlite3's implicit ones start too late.
        connect_args={"timeout": 30.0, "check_same_thread": False, "isolation_level": None},
    )

    @event.listens_for(engine, "connect")
    def _pragmas(connection: sqlite3.Connection, _record: object) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=OFF", "cache_size=-32768"):
            connection.execute(f"PRAGMA {pragma}").close()
        if max_pages:
            connection.execute(f"PRAGMA max_page_count={max_pages}").close()

    begin = "BEGIN IMMEDIATE" if writer else "BEGIN"

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # The driver does this in a tenth of the time that SQLAlchemy needs for a statement.
        driver_of(connection).execute(begin).close()

    return engine


def driver_of(conn: Connection) -> sqlite3.Connection:
    """Return the connection of SQLite's driver, whose transactions are those of `conn`."""
    driver = conn.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


JOB_COLUMNS: Final = ("namespace", "name", "uid", "object_uid", "finished_at", "deleted_at")
"""The columns of a job on which the answer to its tokens depends. Their change is noticed, and so are new and
removed rows."""


def is_storage_full(error: BaseException) -> bool:
    """Return whether a database or file error means that no space is left on the device or in a quota."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return is_storage_full(error.orig)
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) in _SQLITE_FULL
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "sqlstate", None) == "53100"


# A write past RLIMIT_FSIZE or a full WAL gives SQLITE_IOERR_WRITE or one of its shared-memory variants.
_SQLITE_FULL: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_TRUNCATE,
)
_RETRY_STATES: Final = ("40001", "40P01")


def translate(error: Exception) -> Exception:
    """Return the API error with which callers are answered for a database error."""
    if isinstance(error, ApiError):
        return error
    if is_storage_full(error):
        return StorageFull("no space left for the database; nothing was kept, try again when there is room")
    if isinstance(error, sa.exc.IntegrityError):
        return Conflict("another request made the same object at the same moment; ask again")
    # The driver's own error means that a transaction could not begin.
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError | sqlite3.OperationalError):
        cause = getattr(error, "orig", error)
        return Unavailable(f"the database cannot be used now: {cause}", headers={"Retry-After": "1"})
    return error


@contextmanager
def locked_state_dir(state_dir: Path) -> Iterator[None]:
    """Hold the lock of a state folder, which permits one control plane where the database is a file in it.

    The kernel frees the lock when the process ends, even if it is killed.

    Raises:
        ControlPlaneError: Another process holds the lock.
    """
    with (state_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ControlPlaneError(
                f"another control plane uses {state_dir}: stop it, or choose another --state-dir "
                "(several replicas need a PostgreSQL --db)",
                reason="StateFolderInUse",
            ) from error
        yield


def migration_config(connection: Connection) -> Config:
    """Return Alembic's configuration for the packaged migrations on this connection."""
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(_MIGRATIONS))
    settings.attributes["connection"] = connection
    return settings


def revisions() -> list[str]:
    """Return the revisions of the packaged migrations, in their order. File names begin with them."""
    return sorted(path.name[1:5] for path in (_MIGRATIONS / "versions").glob("v[0-9][0-9][0-9][0-9]_*.py"))


def upgrade(engine: Engine) -> None:
    """Create all tables in an empty database, or run the migrations that it lacks, in one transaction.

    Raises:
        ControlPlaneError: The database is that of a version that this one does not know.
    """
    known = revisions()
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
        present = _present_revisions(connection)
        if present == [known[-1]]:
            return
        if unknown := sorted(set(present) - set(known)):
            raise ControlPlaneError(
                f"the database has the schema {', '.join(unknown)}, and this version of Rollyard knows none "
                f"after {known[-1]}: start the version that has written it, or name an empty database (--db)",
                reason="UnknownSchema",
            )
        # Loading Alembic takes most of the time of a start, and a restarted control plane needs no migration.
        from alembic import command

        if present:
            command.upgrade(migration_config(connection), "head")
        else:
            # Tables of something else that have such a name are an error, and are not taken over.
            metadata.create_all(connection, checkfirst=False)
            command.stamp(migration_config(connection), "head")


def _present_revisions(connection: Connection) -> list[str]:
    """Return the revisions that Alembic has noted in the database."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return []
    return list(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars())


class Database:
    """The engines, the writer thread and the readers. Open it with `start` and end it with `close`."""

    def __init__(self, url: str, *, sqlite_max_pages: int = 0) -> None:
        parsed = make_url(url)
        self.sqlite = parsed.get_backend_name() == "sqlite"
        if self.sqlite:
            self.writer = _sqlite_engine(parsed, sqlite_max_pages, writer=True)
            self.reader = _sqlite_engine(parsed, sqlite_max_pages, writer=False)
        else:
            # The writer uses READ COMMITTED and row locks. The statements of a reader share one snapshot.
            self.writer = sa.create_engine(parsed, pool_size=1, max_overflow=1, pool_pre_ping=True)
            self.reader = sa.create_engine(
                parsed,
                pool_size=READERS,
                max_overflow=0,
                isolation_level="REPEATABLE READ",
                pool_pre_ping=True,
            )
        # These queues are written in C. Those with a bound, and the futures of an executor, take longer than
        # many queries. Only the event loop's thread adds to them, and it keeps to MAX_WAITING.
        self._waiting: queue.SimpleQueue[_Waiting[Any] | None] = queue.SimpleQueue()
        self._queries: queue.SimpleQueue[_Query[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._readers: list[threading.Thread] = []
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._after: AfterCommit = lambda _committed: None
        self._synchronous = ""
        self._reading = 0
        self._watches_jobs = False
        self._touches_jobs = False
        self._job_changes = 0
        self.trace_sample = 0.0
        """The fraction of groups whose rollouts are traced; 0 if nothing is."""
        if self.sqlite:
            event.listen(self.writer, "connect", self._watch_jobs)

    @property
    def job_changes(self) -> int | None:
        """The number of commits that changed which jobs exist and which have ended, or None if unknown.

        It is raised before the change is answered. Where other replicas write, it is unknown.
        """
        return self._job_changes if self._watches_jobs else None

    def start(self, after_commit: AfterCommit) -> None:
        """Start the writer, once the schema is up to date (see `upgrade`).

        `after_commit` is called in the event loop's thread, before the answers.
        """
        self._loop = asyncio.get_running_loop()
        self._after = after_commit
        # A new connection finds the tables, which the migration may have made.
        self.writer.dispose()
        self._thread = threading.Thread(target=self._write_forever, name="writer", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Finish the waiting ops and queries, then close every connection."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            await asyncio.to_thread(thread.join)
        self._closed = True
        readers, self._readers = self._readers, []
        for _ in readers:
            self._queries.put(None)
        for reader in readers:
            await asyncio.to_thread(reader.join)
        self.writer.dispose()
        self.reader.dispose()

    async def write(self, op: Callable[[Transaction], T], *, durable: bool = True) -> T:
        """Run `op` in the writer and return its result once its changes are committed.

        Args:
            op: The change. It may be run more than once, each time in a new transaction.
            durable: Whether the commit must survive a power cut, and not only a killed process.

        Raises:
            Unavailable: Too many ops wait, or the database cannot be used.
            StorageFull: There is no space, and nothing was changed.
            ApiError: The op raised it, and nothing was changed.
        """
        if self._loop is None or self._thread is None:
            raise Unavailable("the database is closed")
        if self._waiting.qsize() >= MAX_WAITING:
            raise Unavailable("too many requests wait for the database", headers={"Retry-After": "1"})
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put(_Waiting(op, future, durable))
        return await future

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` on a snapshot, in a reader thread. It must read nothing but the database.

        Raises:
            Unavailable: Too many queries wait, or the database cannot be used.
            ApiError: The query raised it.
        """
        if self._reading >= MAX_WAITING:
            raise Unavailable("too many requests wait for the database", headers={"Retry-After": "1"})
        if self._closed:
            raise Unavailable("the database is closed")
        for number in range(len(self._readers), READERS):
            reader = threading.Thread(target=self._read_forever, name=f"reader_{number}", daemon=True)
            reader.start()
            self._readers.append(reader)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._reading += 1
        try:
            self._queries.put(_Query(query, future))
            return await future
        finally:
            self._reading -= 1

    def _read_forever(self) -> None:
        while (request := self._queries.get()) is not None:
            if request.future.cancelled():
                continue
            error: Exception | None = None
            try:
                with self.reader.connect() as conn:
                    request.result = request.query(conn)
            except Exception as raised:
                error = translate(raised)
                if error is not raised:
                    error.__cause__ = raised
            try:
                request.future.get_loop().call_soon_threadsafe(_settle, request, error)
            except RuntimeError:
                # The loop is closed, so no caller waits any more.
                return
            # This answer must not stay in memory until the next query.
            del request, error

    def _write_forever(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch = [first]
            while len(batch) < MAX_GROUP and not self._waiting.empty():
                item = self._waiting.get()
                if item is None:
                    self._waiting.put(None)  # It ends the loop once this batch is written.
                    break
                batch.append(item)
            self._write_batch(batch)

    def _write_batch(self, batch: list[_Waiting[Any]]) -> None:
        for retries in range(MAX_RETRIES + 1):
            try:
                self._commit(batch)
            except Exception as error:
                if len(batch) > 1:
                    for item in batch:
                        self._write_batch([item])
                    return
                if retries == MAX_RETRIES or not _retryable(error):
                    self._answer(batch, translate(error))
                    return
                time.sleep(0.005 * (retries + 1))  # This pause lets the other side of the deadlock commit.
            else:
                self._answer(batch, None)
                return

    def _commit(self, batch: list[_Waiting[Any]]) -> None:
        now = time.time()
        try:
            with self.writer.connect() as conn, self._begin(conn, any(item.durable for item in batch)):
                for item in batch:
                    item.tx = Transaction(conn, now, self.sqlite, trace_sample=self.trace_sample)
                    item.result = item.op(item.tx)
        finally:
            if self._touches_jobs:
                self._touches_jobs = False
                self._job_changes += 1

    def _watch_jobs(self, connection: sqlite3.Connection, _record: object) -> None:
        """Notice changes of JOB_COLUMNS through a new connection, if the table of jobs exists.

        Triggers notice it, whichever code makes the change. They are temporary: they belong to this
        connection, and nothing of them is stored in the database.
        """
        with_jobs = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'jobs'"
        self._watches_jobs = connection.execute(with_jobs).fetchone() is not None
        if not self._watches_jobs:
            return
        connection.create_function("rollyard_job_changed", 0, self._touch_jobs)
        differs = " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in JOB_COLUMNS)
        for change, condition in (("INSERT", ""), ("DELETE", ""), ("UPDATE", f"WHEN {differs} ")):
            connection.execute(
                f"CREATE TEMP TRIGGER rollyard_{change.lower()}_job AFTER {change} ON main.jobs {condition}"
                f"BEGIN SELECT rollyard_job_changed(); END"
            ).close()

    def _touch_jobs(self) -> None:
        self._touches_jobs = True

    def _begin(self, conn: Connection, durable: bool) -> RootTransaction:
        level = "FULL" if durable else "NORMAL"
        if self.sqlite and level != self._synchronous:
            # The driver's connection is used, because SQLAlchemy would begin a transaction for the pragma.
            driver_of(conn).execute(f"PRAGMA synchronous={level}").close()
            self._synchronous = level
        return conn.begin()

    def _answer(self, batch: list[_Waiting[Any]], error: Exception | None) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch, error)
        except RuntimeError:
            # The loop is closed, so no caller waits any more. What was committed stays committed.
            return

    def _deliver(self, batch: list[_Waiting[Any]], error: Exception | None) -> None:
        if error is None:
            self._after([item.tx for item in batch if item.tx is not None])
        for item in batch:
            _settle(item, error)


def _settle(request: _Query[Any] | _Waiting[Any], error: Exception | None) -> None:
    if request.future.cancelled():
        return
    if error is None:
        request.future.set_result(request.result)
    else:
        request.future.set_exception(error)


def _retryable(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _RETRY_STATES
