"""The programs that Eval runs in the sandbox; they need the standard library only, of Python 3.8 or later.

The handler starts this module with one argument and a request, both of which `main` takes. `call` loads the
policy's program and calls its function; nothing that this process says can be relied on. `judge` runs
a test of the task's author, in a process that never loads the policy's code: where the test calls the
function, it gets the result that `call` has reported for these arguments. Results are plain data, so nothing
of the policy's decides how they compare.

Most of an evaluation's time is the start of these processes. Therefore they import little: no annotation is
evaluated, the request is marshalled, and so is the code of this module for a Python of the worker's version,
installed packages are searched for at the first import that needs them, and Python is not finalized.
"""

from __future__ import annotations

import builtins
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 60
MAX_ITEMS = 200_000
MAX_TRACE = 2000
STACK = 256 << 20
ONLY_AST = 0x400  # The value of ast.PyCF_ONLY_AST.


def encode(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON that keeps its type. Other objects become a mark that equals nothing."""
    if depth > MAX_DEPTH:
        return {"o": "deep"}
    if type(value).__name__ == "Anything":  # The class does not exist where the policy's program runs.
        return {"o": "anything"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # The text of an enumeration's member is another one.
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
    named = None if type(value) in PLAIN else library(value)
    if named is not None:
        return {"x": [named[0], encode(named[1], depth + 1)]}
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


def library(value: Any) -> tuple[str, Any] | None:
    """Return the name of a type of the standard library, and plain data that make this value, or None."""
    kind: Any
    for each in ("keys", "values", "items"):
        kind = type(getattr({}, each)())
        if isinstance(value, kind):
            return each, list(value)
    for of, names in LIBRARY.items():
        for each in names:
            kind = getattr(sys.modules.get(of), each, None)
            if kind is None or not isinstance(value, kind):
                continue
            if each == "Fraction":
                return each, [value.numerator, value.denominator]
            if each == "Decimal":
                return each, str(value)
            if each != "defaultdict":
                return each, list(value) if each == "deque" else dict(value)
            default = getattr(value.default_factory, "__name__", "")
            if getattr(builtins, default, None) is value.default_factory:
                return each, [default, dict(value)]
    return None


PLAIN = (list, tuple, dict, set, frozenset)
LIBRARY = {
    "collections": ("deque", "OrderedDict", "Counter", "defaultdict"),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
}


def rebuilt(name: str, data: Any) -> Any:
    """Return the value for which `library` has returned these. Only values that need it import a module."""
    if name in ("keys", "values", "items"):
        mapping = (
            dict.fromkeys(data) if name == "keys" else dict(data if name == "items" else enumerate(data))
        )
        return getattr(mapping, name)()
    for of, names in LIBRARY.items():
        if name in names:
            kind = getattr(__import__(of), name)
            if name == "defaultdict":
                return kind(getattr(builtins, data[0]), data[1])
            return kind(*data) if name == "Fraction" else kind(data)
    raise ValueError(name)


def has_object(value: Any) -> bool:
    """Return whether a value of `encode` holds an object that is not plain data."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            if "o" in each:
                return True
            waiting += each.values()
    return False


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
    if mark == "x":
        return rebuilt(content[0], decode(content[1]))
    if mark in KINDS:
        return KINDS[mark](decode(each) for each in content)
    return object()


KINDS: dict[str, Callable[[Any], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "y": lambda items: iter(list(items)),
}


def quoted(words: str) -> str:
    """Return a text as JSON."""
    if words.isascii() and words.isprintable() and '"' not in words and "\\" not in words:
        return f'"{words}"'
    from json.encoder import encode_basestring_ascii

    return str(encode_basestring_ascii(words))


def text(value: Any) -> str:
    """Return a value of `encode` as JSON, mostly without the time that importing `json` takes."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ",".join(quoted(key) + ":" + text(each) for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    return "null" if value is None else "true" if value else "false"


def compiled(program: Any, name: str) -> Any:
    """Return the code of a program, without the `__future__` imports of this module."""
    return compile(program, name, "exec", dont_inherit=True)


def module(name: str) -> dict[str, Any]:
    """Return the names of a new module, which programs can import."""
    sys.modules[name] = new = type(sys)(name)
    new.__dict__.update({"__builtins__": builtins, "__file__": "solution.py"})
    return new.__dict__


def run(programs: dict[str, str], names: dict[str, Any], out: int) -> None:
    """Run programs of the policy. If one raises an exception, end the process, and write the traceback.

    Args:
        programs: The programs by the names of their files.
        names: The names that they use and define.
        out: The descriptor for the traceback.
    """
    try:
        for name, source in programs.items():
            exec(compiled(source, name), names)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            os.dup2(out, 2)
        raise
    except BaseException as error:
        os.dup2(out, 2)
        error.__traceback__ = its_own(error)
        sys.__excepthook__(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(1)


def its_own(error: BaseException) -> Any:
    """Return the part of an exception's traceback that is not this module's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == run.__code__.co_filename:
        trace = trace.tb_next
    return trace


def call(request: dict[str, Any], out: int) -> None:
    """Call the policy's function with each list of arguments, and write a line for each result.

    A call that is a text is an expression, for which the program and the setup code have made objects.
    """
    names, name = module("solution"), request["entry_point"]
    run({"prefix.py": request["prefix"]}, names, out)
    # What the prefix defines of these names is not an answer, but the policy's program may use it.
    inherited = {each: names.pop(each) for each in ("Solution", name) if each in names}
    run({"solution.py": request["source"]}, names, out)
    its = names.get("Solution")
    function = getattr(its(), name) if its is not None and hasattr(its, name) else names[name]
    names.update({**inherited, **names})
    if request["setup"]:
        names[name] = names["candidate"] = function
        run({"setup.py": request["setup"]}, names, out)
    shown = False
    for each in request["calls"]:
        try:
            if isinstance(each, str):
                value = eval(compile(each, "test.py", "eval", dont_inherit=True), names)
            else:
                value = function(*decode(each[0]), **decode(each[1]))
            result = {"v": encode(value)}
        except Exception as error:
            kinds = [
                kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, 0) is kind
            ]
            result = {"e": kinds[0]}
            if not shown:
                shown, result["trace"] = True, formatted(error)
        write(out, text(result).encode() + b"\n")


def formatted(error: BaseException) -> str:
    """Return the end of an exception's traceback."""
    try:
        import traceback

        return "".join(traceback.format_exception(type(error), error, its_own(error)))[-MAX_TRACE:]
    except Exception:
        return ""


def write(descriptor: int, data: bytes) -> None:
    """Write all of the data, which may be more than a pipe takes at once."""
    while data:
        data = data[os.write(descriptor, data) :]


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


def tolerant(tree: Any) -> Any:
    """Make each assertion a statement that cannot fail, so that all calls of a test are seen in one pass."""
    import ast

    class Tolerant(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.AST:
            handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])
            new = ast.Try([ast.Expr(node.test)], [handler], [], [])
            return ast.fix_missing_locations(ast.copy_location(new, node))

    return Tolerant().visit(tree)


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Run a test with the results that are known: whether it passed, and the calls that it makes."""
    answered: list[Any] = request["answered"]
    calls: list[Any] = []
    missing: list[int] = []
    objects: list[int] = []
    looking = bool(request["collect"])

    def candidate(*arguments: Any, **keywords: Any) -> Any:
        invocation = [encode(arguments), encode(keywords)]
        number = len(calls)
        calls.append(invocation)
        if number < len(answered) and answered[number][0] == invocation:
            result = answered[number][1]
            if "v" in result:
                if has_object(result["v"]):
                    objects.append(number)
                return decode(result["v"])
            kind = getattr(builtins, result["e"], Exception)
            if kind in (StopIteration, StopAsyncIteration):
                # It would silently end an iterator of the test. A generator turns it into this (PEP 479).
                raise RuntimeError("the function raised " + kind.__name__)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else Exception)("raised")
        missing.append(number)
        if looking:
            return Anything()
        raise Unanswered

    names: dict[str, Any] = {"__name__": "test", "__builtins__": builtins}
    if "random" in request["helpers"] + request["program"]:
        import random  # The test has the same numbers each time that it runs.

        random.seed(0)
    try:
        exec(compiled(request["helpers"], "helpers.py"), names)
        names["candidate"] = names[request["entry_point"]] = candidate
        tree = compile(request["program"], "test.py", "exec", ONLY_AST, True)
        exec(compiled(tolerant(tree) if looking else tree, "test.py"), names)
        if callable(names.get("check")):
            names["check"](candidate)
        error = ""
    except Unanswered:
        error = "Unanswered"
    except BaseException as raised:  # A test that ends Python has not reported success.
        error = type(raised).__name__
    if objects:  # It is true, and unequal to all others, whatever the policy's class says.
        error = "TypeError: the function returned an object that is not plain data"
    # A test may have caught Unanswered itself.
    passed = not (looking or error or missing)
    return {"passed": passed, "more": bool(missing), "calls": calls if looking else [], "error": error}


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Run the checker of the task's author on an output."""
    names: dict[str, Any] = {"__name__": "checker", "__builtins__": builtins}
    exec(compiled(request["checker"], "checker.py"), names)
    return {"passed": bool(names["check"](request["input"], request["output"], request["expected"]))}


class InstalledPackages:
    """The last finder of imports, which does what `site` does at the start of Python without `-S`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module that lies in the folders that `site` has added, or None."""
        sys.meta_path.remove(self)
        import site

        site.main()
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def main(action: str, request: dict[str, Any]) -> None:
    """Do what the argument says with the request, and write the answer."""
    memory = int(request["memory"])
    # What is only reserved, or is a library's file, costs nothing. The sandbox may have a lower limit.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    if hasattr(sys, "set_int_max_str_digits"):  # Python 3.11, and some versions of those before.
        sys.set_int_max_str_digits(0)
    sys.meta_path.append(InstalledPackages())
    for name in ("exit", "quit"):  # They come with `site`, too.
        setattr(builtins, name, sys.exit)
    # What programs print goes nowhere; the answer has a descriptor of its own.
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if action in ("call", "run"):
        sys.argv[:] = ["solution.py"]
        # Deep recursion needs more than the usual 8 MiB, and the stack of the first thread grows in place.
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        stack = STACK if most == resource.RLIM_INFINITY else min(STACK, most)
        resource.setrlimit(resource.RLIMIT_STACK, (stack, most))
        # However many processes the policy's program starts, the exec server gets its share of the time.
        os.nice(10)
    if action == "run":
        # Standard output is the answer here, and standard input comes from the request.
        stdin = os.memfd_create("input")
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(request["input"].encode(errors="surrogatepass"))
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        # The file that Python itself opened treats standard input as the pipe that it was.
        old = sys.stdin
        sys.stdin = os.fdopen(0, "r", -1, old.encoding, old.errors, closefd=False)
        run({"prefix.py": request["prefix"], "solution.py": request["source"]}, module("__main__"), out)
        return
    if action == "call":
        call(request, out)
    else:
        answer = judge(request) if action == "judge" else check(request)
        write(out, text(answer).encode())
    # All has been written. Finalizing Python would take a tenth of the time that its start does.
    os._exit(0)
