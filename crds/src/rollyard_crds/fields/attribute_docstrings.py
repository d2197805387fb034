"""The docstrings of a model's fields, which become the descriptions in its JSON schema.

Pydantic can read them itself (`use_attribute_docstrings`), but it does so when a class is made: every process
that imports the models would parse their source code. Only those that write a schema need it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise


@cache
def attribute_docstrings(model: type) -> dict[str, str]:
    """Return the docstring of each documented field of a class, by the field's name.

    The fields of base classes are included. A class whose source code cannot be read adds none.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base.__module__.startswith(("builtins", "pydantic", "typing", "abc")):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                docstrings.pop(field.target.id, None)
                if (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    docstrings[field.target.id] = inspect.cleandoc(after.value.value)
    return docstrings
