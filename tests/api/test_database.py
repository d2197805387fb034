"""The queues before the database: their bounds, cancelled queries, errors, and what a close waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from rollyard_api.core.problems import NotFound, Unavailable
from rollyard_api.storage import database as module
from rollyard_api.storage.database import READERS, Database
from rollyard_testing.pace import patience
from sqlalchemy.engine import Connection


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/some.db")
    made.start(lambda committed: None)
    yield made
    await made.close()


def one(conn: Connection) -> int:
    return int(conn.execute(sa.text("SELECT 1")).scalar_one())


async def _held(database: Database, release: threading.Event) -> list[asyncio.Task[int]]:
    """Return queries that occupy all readers until `release` is set."""
    begun = threading.Semaphore(0)

    def query(conn: Connection) -> int:
        begun.release()
        assert release.wait(patience(30))
        return one(conn)

    tasks = [asyncio.create_task(database.read(query)) for _ in range(READERS)]
    for _ in tasks:
        assert await asyncio.to_thread(begun.acquire, timeout=patience(30))
    return tasks


async def test_a_query_that_nobody_waits_for_is_not_asked(database: Database) -> None:
    release, asked = threading.Event(), []
    busy = await _held(database, release)
    waiting = asyncio.create_task(database.read(lambda conn: asked.append(one(conn))))
    await asyncio.sleep(0)  # It is in the queue now.
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    release.set()
    assert await asyncio.gather(*busy) == [1] * READERS
    assert await database.read(one) == 1, "queries are asked in order"
    assert asked == []


async def test_an_error_reaches_its_caller_only(database: Database) -> None:
    def missing(conn: Connection) -> int:
        return int(conn.execute(sa.text("SELECT * FROM missing")).scalar_one())

    def refused(_conn: Connection) -> int:
        raise NotFound("nothing is there")

    results = await asyncio.gather(
        database.read(missing), database.read(one), database.read(refused), return_exceptions=True
    )
    assert isinstance(results[0], Unavailable)
    assert isinstance(results[0].__cause__, sa.exc.OperationalError)
    assert results[1] == 1
    assert isinstance(results[2], NotFound)


async def test_more_than_may_wait_are_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", READERS)
    release, begun = threading.Event(), threading.Event()

    def hold(_tx: module.Transaction) -> None:
        begun.set()
        assert release.wait(patience(30))

    held = [asyncio.create_task(database.write(hold))]
    assert await asyncio.to_thread(begun.wait, patience(30))
    # The writer has taken the first op, and these wait.
    held += [asyncio.create_task(database.write(lambda tx: None)) for _ in range(READERS)]
    queries = await _held(database, release)
    with pytest.raises(Unavailable, match="too many requests wait for the database"):
        await database.write(lambda tx: None)
    with pytest.raises(Unavailable, match="too many requests wait for the database"):
        await database.read(one)
    release.set()
    await asyncio.gather(*held)
    assert await asyncio.gather(*queries) == [1] * READERS
    assert await database.read(one) == 1


async def test_a_close_waits_for_the_queries(tmp_path: Path) -> None:
    database, release = Database(f"sqlite:///{tmp_path}/some.db"), threading.Event()
    queries = await _held(database, release)
    closing = asyncio.create_task(database.close())
    done, _ = await asyncio.wait({closing}, timeout=0.1)
    assert not done
    release.set()
    await closing
    assert await asyncio.gather(*queries) == [1] * READERS
    with pytest.raises(Unavailable, match="the database is closed"):
        await database.read(one)
