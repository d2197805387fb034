"""Making and running statements where the two databases differ.

Statements of the hot path are compiled once, and SQLite's driver then runs them directly. SQLAlchemy compiles
them and knows the types. What else it does at each execution takes longer than SQLite needs for most of them.
PostgreSQL, which is further away, is always used through SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from rollyard_api.storage.database import Transaction, driver_of

T = TypeVar("T", str, int)

IDS_AT_ONCE: Final = 500
"""The number of ids in one statement."""
_Conversion = tuple[int, Callable[[Any], Any]]
"""The place of a value, and the function that converts it for the database or from it."""


class _Plan(NamedTuple):
    """A statement as the driver takes it."""

    sql: str
    names: tuple[str | None, ...]
    """The name of the value, for each place in the SQL; None for a constant of the statement."""
    constants: tuple[Any, ...]
    """The constants, for each place."""
    bound: tuple[_Conversion, ...]
    """The conversions of the values, by their places in the SQL."""
    read: tuple[_Conversion, ...]
    """The conversions of the columns of a row."""

    def parameters(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the values in the order of their places."""
        lists = {name: iter(value) for name, value in values.items() if isinstance(value, list)}
        parameters = [
            constant if name is None else next(lists[name]) if name in lists else values[name]
            for name, constant in zip(self.names, self.constants, strict=True)
        ]
        for index, convert in self.bound:
            parameters[index] = convert(parameters[index])
        return parameters


def chunks(ids: Sequence[T]) -> Iterator[list[T]]:
    """Yield the ids in lists that one statement may name."""
    for at in range(0, len(ids), IDS_AT_ONCE):
        yield list(ids[at : at + IDS_AT_ONCE])


def rows_of(conn: Connection, query: sa.Select[Any], values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    """Return the rows of a query.

    Args:
        conn: The connection, on which a transaction begins if there is none.
        query: A query that is made once, and not for each call.
        values: A value for each of its parameters, which is a list for one that expands.
    """
    if conn.dialect.name != "sqlite":
        return conn.execute(query, values).all()
    if not conn.in_transaction():
        conn.begin()
    plan = _plan(query, conn.dialect, _shape(values))
    rows: list[Sequence[Any]] = driver_of(conn).execute(plan.sql, plan.parameters(values)).fetchall()
    if not plan.read:
        return rows
    converted = [list(row) for row in rows]
    for row in converted:
        for index, convert in plan.read:
            row[index] = convert(row[index])
    return converted


def run(tx: Transaction, statement: sa.Executable, rows: Sequence[Mapping[str, Any]]) -> None:
    """Run a statement that changes rows, once for each mapping. All of them have the same names."""
    if not tx.sqlite:
        tx.conn.execute(statement, rows)
        return
    plan = _plan(statement, tx.conn.dialect, _shape(rows[0]))
    driver_of(tx.conn).executemany(plan.sql, [plan.parameters(values) for values in rows])


def _shape(values: Mapping[str, Any]) -> tuple[tuple[str, int | None], ...]:
    """Return the names of the values, each with its length if it is a list."""
    return tuple((name, len(value) if isinstance(value, list) else None) for name, value in values.items())


@lru_cache(maxsize=512)
def _plan(statement: Any, dialect: Dialect, shape: tuple[tuple[str, int | None], ...]) -> _Plan:
    values = {name: None if length is None else [None] * length for name, length in shape}
    compiled = statement.compile(dialect=dialect, column_keys=sorted(values))
    state = compiled.construct_expanded_state(values)
    owners = {member: name for name, members in state.parameter_expansion.items() for member in members}
    names, constants, bound = [], [], []
    for index, name in enumerate(state.positiontup):
        owner = owners.get(name, name)
        convert = compiled.binds[owner].type.dialect_impl(dialect).bind_processor(dialect)
        is_value = owner in values
        names.append(owner if is_value else None)
        constant = None if is_value else state.parameters[name]
        constants.append(constant if convert is None or is_value else convert(constant))
        if is_value and convert is not None:
            bound.append((index, convert))
    columns = statement.selected_columns if isinstance(statement, sa.Select) else ()
    converts = [column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns]
    read = [(index, convert) for index, convert in enumerate(converts) if convert is not None]
    return _Plan(state.statement, tuple(names), tuple(constants), tuple(bound), tuple(read))


def by_dialect(make: Callable[[Callable[[sa.Table], Any]], Any]) -> dict[bool, Any]:
    """Return the statements that `make` builds from the `insert` of SQLite (True) and PostgreSQL (False)."""
    return {True: make(sqlite.insert), False: make(postgresql.insert)}


class PlaceIn(FunctionElement[int]):
    """The position, from 1, of a second text or binary in a first one, or 0. No character is special."""

    type = sa.Integer()
    inherit_cache = True
    name = "place_in"


@compiles(PlaceIn, "sqlite")
def _instr(element: PlaceIn, compiler: SQLCompiler, **options: Any) -> str:
    return f"instr({compiler.process(element.clauses, **options)})"


@compiles(PlaceIn, "postgresql")
def _position(element: PlaceIn, compiler: SQLCompiler, **options: Any) -> str:
    whole, part = element.clauses
    return f"position({compiler.process(part, **options)} in {compiler.process(whole, **options)})"
