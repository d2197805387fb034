"""Hot statements give the driver what SQLAlchemy would give it, and read what SQLAlchemy would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Database, Transaction
from rollyard_api.storage.schema import metadata, rollouts
from rollyard_api.storage.statements import rows_of, run
from sqlalchemy import bindparam

_AMONG = rollouts.c.id.in_(bindparam("b_ids", expanding=True))
_IN = sa.select(rollouts.c.id, rollouts.c.state, rollouts.c.lease_expires).order_by(rollouts.c.id)
_UPDATE = sa.update(rollouts).where(rollouts.c.id == bindparam("b_id"))
QUERIES: list[tuple[sa.Select[Any], dict[str, Any]]] = [
    (_IN, {}),
    (_IN.where(_AMONG), {"b_ids": ["r-0-1", "r-1-0", "no'ne"]}),
    (_IN.where(_AMONG), {"b_ids": ["r-0-0"]}),
    (_IN.where(_AMONG), {"b_ids": []}),
    (_IN.where(rollouts.c.state == bindparam("b_state")), {"b_state": RolloutState.LEASED_RUN}),
    (_IN.where(rollouts.c.state.in_([RolloutState.LEASED_RUN, RolloutState.QUEUED_EVAL]), _AMONG),
     {"b_ids": ["r-0-0", "r-0-1"]}),
    (_IN.where(rollouts.c.state < RolloutState.SUCCEEDED).limit(bindparam("b_limit")), {"b_limit": 2}),
]  # fmt: skip


@pytest.fixture
def database(tmp_path: Path) -> Database:
    made = Database(f"sqlite:///{tmp_path}/rows.db")
    metadata.create_all(made.writer)
    with made.writer.connect() as conn, conn.begin():
        tx = Transaction(conn, now=1.0, sqlite=True)
        rollout_rows.add(tx, 1, "r", range(2), 2)
        # The values are an enumeration, None, a text and a float; all of them keep their types.
        some: list[dict[str, Any]] = [
            {"b_id": "r-0-0", "state": RolloutState.LEASED_RUN, "lease_expires": 2.5, "worker": "w'1"},
            {"b_id": "r-0-1", "state": RolloutState.SUCCEEDED, "lease_expires": None, "worker": None},
        ]
        run(tx, _UPDATE, some)
    return made


def test_values_are_written_with_the_types_of_their_columns(database: Database) -> None:
    with database.reader.connect() as conn:
        columns = (rollouts.c.state, rollouts.c.lease_expires, rollouts.c.worker)
        rows = conn.execute(sa.select(*columns).order_by(rollouts.c.id)).all()
    assert rows[:2] == [(RolloutState.LEASED_RUN, 2.5, "w'1"), (RolloutState.SUCCEEDED, None, None)]
    assert {row.state for row in rows[2:]} == {RolloutState.QUEUED_INIT}


@pytest.mark.parametrize("place", range(len(QUERIES)))
def test_a_query_reads_what_sqlalchemy_reads(place: int, database: Database) -> None:
    query, values = QUERIES[place]
    with database.reader.connect() as conn:
        expected = [tuple(row) for row in conn.execute(query, values)]
        assert [tuple(row) for row in rows_of(conn, query, values)] == expected
        assert all(isinstance(row[1], RolloutState) for row in rows_of(conn, query, values))


def test_queries_of_one_connection_share_a_snapshot(database: Database) -> None:
    with database.reader.connect() as conn:
        before = rows_of(conn, _IN, {})
        with database.writer.connect() as writing, writing.begin():
            tx = Transaction(writing, now=1.0, sqlite=True)
            run(tx, _UPDATE, [{"b_id": "r-1-0", "state": RolloutState.FAILED}])
        assert rows_of(conn, _IN, {}) == before
