"""Tests of simple assertions, which are read instead of run. This saves the time of their processes.

Most tests of data sets look like `assert candidate(3) == 9`. Their calls can be read from the text, so that
the policy's process can start at once, and their verdict can often be reached in the worker: the few
operations that are known here are applied to plain data of a bounded size, and none of them takes long or
needs much memory, whatever the policy has returned. Any other test runs in processes of its own.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard_pipeline.errors import WorkerError
from rollyard_pipeline.handlers.code.programs import parsed
from rollyard_pipeline.handlers.code.sandboxed import decode, encode

_MOST_READ: Final = 200_000
"""The largest number of characters of a test that is read."""
_MOST_HASHED: Final = 1000
"""The largest number of items of a set or dictionary made here. The policy can choose items of one hash."""
_MOST_VALUES: Final = 20_000
"""The largest number of values in a result here, and of characters in a text."""
_LARGEST: Final = 1 << 64
"""The largest number in size that is calculated with here."""
_HIGHEST: Final = 64
"""The highest exponent of a power that is calculated here."""
_EVALUATED_ONCE: Final = (
    ast.Assert,
    ast.Expr,
    ast.Compare,
    ast.Call,
    ast.keyword,
    ast.UnaryOp,
    ast.BinOp,
    ast.Subscript,
    ast.Attribute,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.Constant,
    ast.Name,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)
"""The syntax whose parts are all evaluated exactly once, whatever the values are."""
_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_CALCULATE: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
_EXACT: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_FUNCTIONS: Final[Mapping[str, tuple[Callable[[Any], Any], tuple[type, ...]]]] = {
    "abs": (abs, (int, float, complex)),
    "bool": (bool, (object,)),
    "len": (len, (str, bytes, list, tuple)),
    "list": (list, (list, tuple)),
    "sorted": (sorted, (list, tuple)),
    "tuple": (tuple, (list, tuple)),
}
"""The functions that are known here, and the types that their only argument may have."""


class _Unknown(WorkerError):
    """The test has to be run."""


class PlainTest:
    """A test whose calls of the tested function have literal arguments, and are made in any case.

    Args:
        calls: The encoded arguments and keyword arguments of each call, in the order in which they are made.
        assertions: What the test asserts, or None if it does anything else.
        places: The place in `calls` of each call in the assertions.
    """

    def __init__(
        self, calls: list[Any], assertions: list[ast.expr] | None, places: Mapping[ast.Call, int]
    ) -> None:
        self.calls = calls
        self._assertions = assertions
        self._places = places

    def verdict(self, results: Sequence[Mapping[str, Any]]) -> bool | None:
        """Return whether the test passes with these results of its calls, or None if it has to be run.

        Args:
            results: An object with the key `v` (an encoded value) or `e` (the name of an exception) for each
                call.
        """
        if self._assertions is None or any("v" in result and _awkward(result["v"]) for result in results):
            return None
        try:
            return all(self._value(assertion, results) for assertion in self._assertions)
        except (_Unknown, RecursionError):
            return None
        except Exception:
            return False  # The test raises it as well.

    def _value(self, node: ast.expr, results: Sequence[Mapping[str, Any]]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            items = [self._value(item, results) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items)
        if isinstance(node, ast.Dict | ast.Set):
            try:
                return ast.literal_eval(node)
            except ValueError as error:
                raise _Unknown from error
        if isinstance(node, ast.Call):
            if node in self._places:
                return decode(results[self._places[node]]["v"])  # A KeyError stands for the exception.
            if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and len(node.args) == 1:
                function, types = _FUNCTIONS[node.func.id]
                argument = self._value(node.args[0], results)
                if isinstance(argument, types) and not node.keywords:
                    return function(argument)
        elif isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, results)
            if isinstance(node.op, ast.Not):
                return not value
            if isinstance(node.op, ast.USub) and isinstance(value, int | float | complex):
                return -value
        elif isinstance(node, ast.BinOp) and type(node.op) in _CALCULATE:
            sides = self._value(node.left, results), self._value(node.right, results)
            if all(isinstance(side, int | float | complex) for side in sides):
                return _CALCULATE[type(node.op)](*sides)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            other = node.comparators[0]
            single = isinstance(other, ast.Constant) and other.value in (None, True, False)
            if single or not isinstance(node.ops[0], ast.Is | ast.IsNot):
                return _COMPARE[type(node.ops[0])](
                    self._value(node.left, results), self._value(other, results)
                )
        raise _Unknown


def plain_test(program: str, name: str) -> PlainTest | None:
    """Return a test whose calls can be read, or None if it has to be run to find them.

    A wrong guess costs time and nothing else, because a test that is run gets a result for exactly the calls
    that it makes.

    Args:
        program: The test, which calls the function as `candidate` or by its name.
        name: The function's name.
    """
    tree = parsed(program) if len(program) <= _MOST_READ else None
    if tree is None:
        return None
    checks = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "check"]
    if len(checks) > 1:
        return None
    outside = [each for each in tree.body if each not in checks]
    calls: list[Any] = []
    assertions: list[ast.expr] | None = []
    places: dict[ast.Call, int] = {}
    for statement in [*outside, *(each for check in checks for each in check.body)]:
        try:
            for call in _calls(statement, {"candidate", name}):
                places[call] = len(calls)
                calls.append(_literal(call))
        except (_Unknown, ValueError, TypeError, RecursionError, MemoryError):
            return None
        if isinstance(statement, ast.Assert) and assertions is not None:
            assertions.append(statement.test)
        elif not _is_idle(statement):
            assertions = None
    return PlainTest(calls, assertions, places)


@dataclass(frozen=True, slots=True)
class PlacedTest:
    """A test whose calls have arguments that are made where the policy's program is.

    Attributes:
        program: The test, with `candidate(0)` for its first call, `candidate(1)` for the second, and so on.
        expressions: The calls as they stand in the test, which are all that the policy's process gets of it.
    """

    program: str
    expressions: list[str]


def placed_test(program: str, name: str) -> PlacedTest | None:
    """Return a test with its calls apart, or None if it is not certain which calls it makes.

    Args:
        program: The test, which calls the function as `candidate` or by its name.
        name: The function's name.
    """
    tree = parsed(program) if len(program) <= _MOST_READ else None
    if tree is None:
        return None
    # What the test itself defines is not there where its calls are made.
    local = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    apart = _CallsApart({"candidate", name})
    replaced = ast.unparse(apart.visit(tree))
    plain = plain_test(replaced, name)
    used = {node.id for call in apart.calls for node in ast.walk(call) if isinstance(node, ast.Name)}
    if plain is None or len(plain.calls) != len(apart.calls) or used & local:
        return None
    return PlacedTest(replaced, [ast.unparse(call) for call in apart.calls])


class _CallsApart(ast.NodeTransformer):
    """Replaces the calls of the functions with these names, and keeps them in `calls`."""

    def __init__(self, names: set[str]) -> None:
        self.calls: list[ast.Call] = []
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return a call of `candidate` with the number of this call, if it is one of the functions'."""
        if not isinstance(node.func, ast.Name) or node.func.id not in self._names:
            return self.generic_visit(node)
        self.calls.append(node)
        number = ast.Constant(len(self.calls) - 1)
        return ast.copy_location(ast.Call(ast.Name("candidate", ast.Load()), [number], []), node)


def _calls(statement: ast.stmt, names: set[str]) -> list[ast.Call]:
    """Return the calls of the function in a statement, in the order in which they are made.

    Raises:
        _Unknown: It is not certain that the statement makes exactly these calls.
    """
    nodes = list(ast.walk(statement))
    mentioned = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    if not mentioned:
        return []
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func in mentioned]
    if len(calls) != len(mentioned) or not all(isinstance(node, _EVALUATED_ONCE) for node in nodes):
        raise _Unknown
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _literal(call: ast.Call) -> list[Any]:
    if any(keyword.arg is None for keyword in call.keywords):
        raise _Unknown
    keywords = {str(keyword.arg): _constant(keyword.value) for keyword in call.keywords}
    return [encode(tuple(map(_constant, call.args))), encode(keywords)]


def _constant(node: ast.expr) -> Any:
    """Return the value of an argument that is calculated from literals alone.

    Raises:
        _Unknown: The value could be large, or is known only where the test runs.
        ValueError, TypeError: There are not only literals.
    """
    if isinstance(node, ast.BinOp):
        left, right = _constant(node.left), _constant(node.right)
        if type(left) is type(right) is str and isinstance(node.op, ast.Add):
            return left + right
        if type(left) not in (int, float) or type(right) not in (int, float):
            return ast.literal_eval(node)  # This knows complex numbers.
        if not (abs(left) <= _LARGEST and abs(right) <= _LARGEST):
            raise _Unknown
        if type(node.op) in _EXACT:
            return _EXACT[type(node.op)](left, right)
        if isinstance(node.op, ast.Pow) and type(left) is type(right) is int and 0 <= right <= _HIGHEST:
            return left**right
        raise _Unknown
    if isinstance(node, ast.List | ast.Tuple):
        items = [_constant(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    return ast.literal_eval(node)


def _is_idle(statement: ast.stmt) -> bool:
    """Return whether a statement changes nothing for the assertions: a comment, an import, a description."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [alias.asname or alias.name for alias in statement.names]
    elif isinstance(statement, ast.Assign) and all(isinstance(each, ast.Name) for each in statement.targets):
        names = [each.id for each in statement.targets if isinstance(each, ast.Name)]
        if any(isinstance(node, ast.Call) for node in ast.walk(statement.value)):
            return False
    elif isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    else:
        return isinstance(statement, ast.Pass)
    return not _FUNCTIONS.keys() & {*names} and "*" not in names


def _awkward(value: Any) -> bool:
    """Return whether an encoded value could take long to make or compare, or holds more than plain data."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if count > _MOST_VALUES or (isinstance(each, str | list) and len(each) > _MOST_VALUES):
            return True
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            for mark, content in each.items():
                hashed = mark in ("s", "z", "d") and isinstance(content, list)
                if mark in ("y", "x", "o") or (hashed and len(content) > _MOST_HASHED):
                    return True
                waiting.append(content)
    return False
