"""The programs that Eval runs in the sandbox; they need the standard library only, of Python 3.8 or later.

The source of this module is given to `python -c` with one argument. `call` loads the policy's program and
calls its function; everything that this process says is the policy's word. `judge` runs a test of the task's
author, in a process that never loads the policy's code: where the test calls the function, it gets the result
that `call` has reported for these arguments. Results are plain data, so nothing of the policy's decides how
they compare.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 60
MAX_ITEMS = 200_000


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON that keeps its type. Other objects become a mark that equals nothing."""
    if depth > MAX_DEPTH:
        return {"o": "deep"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return {"i": format(int(value), "x")}
    if isinstance(value, float):
        return {"f": float.__repr__(value)}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, range):
        return {"r": [encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, dict):
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    for kind, mark in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {mark: [encode(each, depth + 1) for each in value]}
    for convert in ("tolist", "item"):  # NumPy's arrays and numbers become Python's.
        if callable(getattr(value, convert, None)):
            return encode(getattr(value, convert)(), depth + 1)
    if hasattr(value, "__next__"):
        items = []
        for each in value:
            items.append(encode(each, depth + 1))
            if len(items) > MAX_ITEMS:
                return {"o": "endless"}
        return {"y": items}
    return {"o": type(value).__name__}


def decode(value: Any) -> Any:
    """Return the value that `encode` has written. A mark becomes an object that equals nothing else."""
    if not isinstance(value, dict):
        return value
    ((mark, content),) = value.items()
    if mark == "i":
        return int(content, 16)
    if mark == "f":
        return float(content)
    if mark == "c":
        return complex(float(content[0]), float(content[1]))
    if mark == "b":
        return bytes.fromhex(content)
    if mark == "d":
        return {decode(k): decode(v) for k, v in content}
    if mark == "r":
        return range(*(decode(part) for part in content))
    if mark in KINDS:
        return KINDS[mark](decode(each) for each in content)
    return object()


KINDS: dict[str, Callable[[Any], Any]] = {
    "l": list, "t": tuple, "s": set, "z": frozenset, "y": lambda items: iter(list(items)),
}  # fmt: skip


def call(request: dict[str, Any], out: int) -> None:
    """Call the policy's function with each list of arguments, and write a line for each result."""
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    exec(compile(request["source"], "solution.py", "exec"), names)
    function = names.get(request["entry_point"])
    if function is None:
        function = getattr(names["Solution"](), request["entry_point"])
    for arguments, keywords in request["calls"]:
        try:
            given = decode(arguments)
            result = {"v": encode(function(*given, **decode(keywords)))}
        except Exception as error:
            kinds = [
                kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, 0) is kind
            ]
            result = {"e": kinds[0]}
        os.write(out, json.dumps(result).encode() + b"\n")


class Unanswered(BaseException):
    """A test called the function with arguments for which there is no result yet."""


class Anything:
    """The result of a call that has not been made: it accepts every operation."""

    def _same(self, *_arguments: Any, **_keywords: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return True

    def __float__(self) -> float:
        return 0.0

    def __int__(self) -> int:
        return 0

    def __len__(self) -> int:
        return 0

    __index__ = __int__
    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __mod__ = __rmod__ = __pow__ = __rpow__ = __floordiv__ = __neg__ = __abs__ = __getitem__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __call__ = __round__ = _same

    def __getattr__(self, _name: str) -> Any:
        return self

    def __eq__(self, _other: object) -> bool:
        return True


class Tolerant(ast.NodeTransformer):
    """Makes each assertion a statement that cannot fail, so that all calls of a test are seen in one pass."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return a `try` statement with the asserted expression."""
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
        new = ast.Try([ast.Expr(node.test)], [handler], [], [])
        return ast.fix_missing_locations(ast.copy_location(new, node))


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Run a test with the results that are known: whether it passed, and the calls that it makes."""
    answered: list[Any] = request["answered"]
    calls: list[Any] = []
    missing: list[int] = []
    looking = bool(request["collect"])

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        made = json.loads(json.dumps([encode(arguments), encode(keywords)]))
        place = len(calls)
        calls.append(made)
        if place < len(answered) and answered[place][0] == made:
            result = answered[place][1]
            if "v" in result:
                return decode(result["v"])
            kind = getattr(builtins, result["e"], Exception)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)("raised")
        missing.append(place)
        if looking:
            return Anything()
        raise Unanswered

    names: dict[str, Any] = {"__name__": "test", "__builtins__": builtins}
    random.seed(0)
    try:
        exec(compile(request["helpers"], "helpers.py", "exec"), names)
        names["candidate"] = names[request["entry_point"]] = candidate
        tree = ast.parse(request["program"])
        exec(compile(Tolerant().visit(tree) if looking else tree, "test.py", "exec"), names)
        if callable(names.get("check")):
            names["check"](candidate)
        error = ""
    except Unanswered:
        error = "Unanswered"
    except Exception as raised:
        error = type(raised).__name__
    # A test may have caught Unanswered itself.
    passed = not (looking or error or missing)
    return {"passed": passed, "more": bool(missing), "calls": calls, "error": error}


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Run the checker of the task's author on an output."""
    names: dict[str, Any] = {"__name__": "checker", "__builtins__": builtins}
    exec(compile(request["checker"], "checker.py", "exec"), names)
    return {"passed": bool(names["check"](request["input"], request["output"], request["expected"]))}


def main(what: str) -> None:
    """Do what the argument says with the request on standard input, and write the answer."""
    request = json.load(sys.stdin.buffer)
    memory = int(request["memory"])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # What programs print goes nowhere; the answer has a descriptor of its own.
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if what in ("call", "run"):
        # However many processes the policy's program starts, the exec server gets its share of the time.
        os.nice(10)
    if what == "call":
        call(request, out)
    elif what == "run":
        # Standard output is the answer here, and standard input comes from the request.
        given = os.memfd_create("input")
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(request["input"].encode(errors="surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        os.dup2(given, 0)
        os.dup2(out, 1)
        source = compile(request["source"], "solution.py", "exec")
        names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        exec(source, names)
    else:
        answer = judge(request) if what == "judge" else check(request)
        os.write(out, json.dumps(answer).encode())


if __name__ == "__main__":
    main(sys.argv[1])
