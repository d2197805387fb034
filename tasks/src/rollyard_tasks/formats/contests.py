"""Tasks of programming contests: the imports that programs expect, the prompt, and the tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from rollyard_crds.fields.code_tests import MAX_CASES

from rollyard_tasks.formats.interface import Row, RowRefused

CONTEST_PREFIX: Final = """\
from typing import *
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
import bisect, collections, copy, datetime, functools, heapq, io, itertools, json, math, operator
import random, re, statistics, string, sys
sys.setrecursionlimit(600_000)
"""
"""LiveCodeBench's imports, and the depth of recursion that graders of verl's rows permit.

The builtins come after modules with functions of the same name: `math.pow` takes no modulus.
"""


def request(starter: str, name: str | None) -> str:
    """Return the request to the policy.

    Args:
        starter: The code that it completes, or "".
        name: The function that is called, or None for a program.
    """
    program = "Write a Python program that reads standard input and writes standard output."
    if not starter:
        return program if name is None else f"Write the Python function {name}."
    instruction = f"Complete this Python code:\n\n```python\n{starter}\n```"
    return instruction if name is not None else f"{instruction}\n\n{program}"


def call_tests(row: Row) -> dict[str, Any]:
    """Return the tests of an object with `inputs`, `outputs` and, if a function is called, `fn_name`.

    Raises:
        RowRefused: The lists are missing, empty, too long, or of different lengths.
    """
    inputs, outputs = row.items("inputs"), row.items("outputs")
    if not inputs or len(inputs) != len(outputs):
        raise RowRefused(row.name("outputs"), "must be as many as the inputs, and at least one")
    if len(inputs) > MAX_CASES:
        raise RowRefused(row.name("inputs"), f"must be at most {MAX_CASES}")
    name = row.text("fn_name", "")
    if not name:
        cases = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
        return code_tests(cases)
    # APPS and TACO write values, and may put each result into a list of its own. Others write JSON texts.
    plain = any(isinstance(item, list) for item in inputs)
    cases = zip(map(_arguments, inputs), results(outputs, plain=plain), strict=True)
    unwrap = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    return code_tests(cases, entry_point=name, **({"unwrap": True} if unwrap else {}))


def code_tests(cases: Iterable[tuple[str, str]], **tests: Any) -> dict[str, Any]:
    """Return tests of inputs and outputs, with further fields of `tests`."""
    listed = [{"input": input_text, "output": output_text} for input_text, output_text in cases]
    return {"prefix": CONTEST_PREFIX, "cases": listed, "compare": "numeric", **tests}


def _lines(value: Any) -> str:
    """Return the standard input or output of a program, which may be given as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    """Return the arguments of a function as JSON, one a line."""
    if isinstance(value, str):
        return value
    return "\n".join(map(json.dumps, value)) if isinstance(value, list) else json.dumps(value)


def results(outputs: list[Any], *, plain: bool) -> list[str]:
    """Return results of a function as JSON.

    Args:
        outputs: The results of all tests. Texts are JSON already if all of them can be.
        plain: Whether each text is a result as it is.
    """
    if not plain and all(_is_json(each) for each in outputs if isinstance(each, str)):
        return [each if isinstance(each, str) else json.dumps(each) for each in outputs]
    return list(map(json.dumps, outputs))


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True
