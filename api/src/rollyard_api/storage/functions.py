"""SQL functions that the two databases call by different names."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


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
