"""What the two databases express in different ways: names of functions, and inserts that may meet a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


def by_dialect(make: Callable[[Callable[[sa.Table], Any]], Any]) -> dict[bool, Any]:
    """Return the statement that `make` builds of a dialect's `insert`, by whether the dialect is SQLite's."""
    return {True: make(sqlite.insert), False: make(postgresql.insert)}


class PlaceIn(FunctionElement[int]):
    """The place, from 1, of a second text or binary in a first one, or 0. No sign in them has a meaning."""

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
