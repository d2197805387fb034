"""A plugin of pytest that reports results where no program can forge them by printing, patching or importing.

`report_start` runs this file before anything of the repository, with builtins of its own. It takes the secret
and removes it, imports pytest, and compiles the files of the tests that decide, while nobody can have changed
what compiles them. It is for Python 3.5 and later, and for every version of pytest since 3.

Each line of the report is signed with the secret, and signatures are chained, so that no line can be added,
left out or repeated from outside of this module. Code of the repository runs in the same process, and could
make every test pass, for example by replacing tests, what runs them or what compares values. Therefore:

- A test of a file that decides has passed only if its own code, as compiled here, was run to its end. For the
  time of the call, the function has code that calls the plugin where it ends.
- After a test that passed, a function that fails is put in its place and goes the same way. The report says
  whether it counted as failed.
"""

import ast
import functools
import json
import os
import sys
import types
import warnings
from hashlib import sha256
from os import write
from os.path import join, realpath, relpath
from typing import Any

NAME = "rollyard_report"
SECRET = "secret"
REPORT = "report"
TAMPERED = "TAMPERED"
MARK = "@rollyard"
"""The name by which the code of a test calls the plugin, and the beginning of each function's key."""
_MAX_FILES = 4096
_DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def sign(secret: bytes, last: bytes, text: bytes) -> bytes:
    """Return the signature, in hexadecimal, of a line that follows the one with the signature `last`."""
    inner = sha256(secret + b"1" + last + text).digest()
    return sha256(secret + b"2" + inner).hexdigest().encode()


def _writer(folder: str, secret: bytes) -> Any:
    """Return a function that writes a line: its kind, the name of a test, and a status."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
    file = os.open(join(folder, REPORT), flags, 0o600)
    last = [b""]

    def line(kind: str, test: str, status: str) -> None:
        # Hexadecimal digits keep a name in its place, whatever it is made of.
        name = test.encode("utf-8", "surrogatepass").hex() or "-"
        text = " ".join((kind, name, status)).encode()
        last[0] = sign(secret, last[0], text)
        write(file, last[0] + b" " + text + b"\n")

    return line


class _Ends(ast.NodeTransformer):
    """Lets each function of a module call the plugin, with the function's own key, where it ends."""

    def __init__(self) -> None:
        self.number = 0

    def visit_FunctionDef(self, node: Any) -> Any:
        self.number += 1
        key = MARK + ":" + str(self.number)
        body = [_ReturnEnds(key).visit(each) for each in node.body]
        node.body = [one for each in body for one in (each if isinstance(each, list) else [each])]
        node.body.append(_end(key, node.body[-1]))
        for each in node.body:
            self.generic_visit(each) if not isinstance(each, _DEFINES) else self.visit(each)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class _ReturnEnds(ast.NodeTransformer):
    """Lets the `return` statements of one function call the plugin, but not those of functions in it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def visit(self, node: Any) -> Any:
        return node if isinstance(node, _DEFINES) else super().visit(node)

    def visit_Return(self, node: Any) -> Any:
        if node.value is None:
            return [_end(self.key, node), node]
        node.value = _end(self.key, node, node.value).value
        return node


def _end(key: str, at: Any, value: Any = None) -> Any:
    statement = ast.parse("_(" + repr(key) + ")").body[0]  # type: Any
    statement.value.func.id = MARK
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    if value is not None:
        statement.value.args.append(value)
    return statement


def _codes(code: Any, counterpart: Any, path: Any, rows: Any) -> None:
    """Collect each code object in `code` as a row: its path of names, itself, and the one that calls."""
    kind = types.CodeType
    inner = [each for each in code.co_consts if type(each) is kind]
    others = [each for each in counterpart.co_consts if type(each) is kind]
    for one, other in zip(inner, others):  # noqa: B905
        below = (*path, one.co_name)
        rows.append((below, one, other))
        _codes(one, other, below, rows)


def compiled(source: bytes, path: str) -> Any:
    """Return the code objects of a file, as pytest compiles it and as Python does, as rows of `_codes`."""
    from _pytest.assertion.rewrite import rewrite_asserts

    rewrite = rewrite_asserts  # type: Any
    rows = []  # type: Any
    for rewritten in (True, False):
        pair = []
        for ends in (False, True):
            tree = ast.parse(source, path)
            if ends:
                tree = _Ends().visit(tree)
            if rewritten and "source" in rewrite.__code__.co_varnames[:2]:
                rewrite(tree, source, path, None)
            elif rewritten:
                rewrite(tree, path, None)
            pair.append(compile(tree, path, "exec", dont_inherit=True))
        _codes(pair[0], pair[1], (), rows)
    return rows


def _files(given: Any) -> Any:
    """Return the rows of each file of the tests that decide by its path. A folder stands for its files."""
    paths = []  # type: Any
    for path in given["files"]:
        for folder in (given["folder"], os.getcwd()):
            paths.append(join(folder, path))
            for parent, _folders, names in os.walk(join(folder, path)):
                paths += [join(parent, name) for name in sorted(names)]
    rows = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in [path for path in paths if path.endswith(".py")][:_MAX_FILES]:
            try:
                with open(path, "rb") as file:
                    found = compiled(file.read(), path)
            except (OSError, SyntaxError, ValueError):
                continue  # Pytest will not load it, either.
            rows[relpath(path)] = rows[relpath(realpath(path))] = found
    return rows


def _functions(item: Any) -> Any:
    """Return the functions that a test is made of: its own, and those that a decorator has wrapped."""
    left = [getattr(item, "obj", None)]  # type: Any
    found = []  # type: Any
    while left and len(found) < 64:
        one = left.pop(0)
        if type(one) is types.MethodType:
            one = one.__func__
        if type(one) is functools.partial:
            left.append(one.func)
        elif type(one) is types.FunctionType and not any(one is other for other in found):
            found.append(one)
            for value in one.__dict__.values():
                # Hypothesis keeps the function in an object of its own.
                inner = getattr(value, "__dict__", None)
                left += [value, *(inner.values() if type(inner) is dict else ())]
            for cell in one.__closure__ or ():
                try:
                    left.append(cell.cell_contents)
                except ValueError:
                    continue  # It is empty.
    return found


class Proof:
    """Whether the code of one test, as it was compiled before, is run to its end in a call."""

    def __init__(self) -> None:
        self.ended = False
        self.function = self.code = self.key = None  # type: Any

    def watch(self, item: Any, rows: Any) -> None:
        """Find the function of the test that has one of these codes, and let it call where it ends."""
        begins = MARK + ":"
        for function in _functions(item):
            for _path, code, counterpart in rows:
                if function.__code__ != code:
                    continue
                keys = [
                    each for each in counterpart.co_consts if type(each) is str and each.startswith(begins)
                ]
                self.function, self.code, self.key = function, function.__code__, keys[-1]
                function.__globals__[MARK] = self._end
                function.__code__ = counterpart
                return

    def _end(self, key: Any, value: Any = None) -> Any:
        self.ended = self.ended or key == self.key
        return value

    def close(self) -> None:
        """Give the function its own code again."""
        if self.function is not None:
            self.function.__code__ = self.code
            self.function.__globals__.pop(MARK, None)


def naming(root: str, begun_in: str) -> Any:
    """Return what names a test from the folder in which pytest was started, not from its own root folder.

    The way between the two is found here, so that what the repository does to `os.path` comes too late.
    """
    way = relpath(root, begun_in)
    back = relpath(begun_in, root) + "/"

    def name_of(node: str) -> str:
        if way == "." or not node or node.startswith("::"):
            return node
        if not way.startswith(".."):
            return way + "/" + node
        return node[len(back) :] if node.startswith(back) else way + "/" + node

    return name_of


def reporter(line: Any, names: Any, files: Any, forget: Any) -> Any:
    """Return the hooks of one run of pytest.

    Args:
        line: Writes a line of the report.
        names: The tests that decide, without their parameters, as pytest names them or with dots.
        files: The rows of their files.
        forget: Is called when pytest has read the environment.
    """
    begun_in = os.getcwd()
    name_of = [naming(begun_in, begun_in)]
    controlling = [False]
    calling = [""]
    proofs = {}  # type: Any

    def plain(name: str) -> str:
        return (name.split() or [""])[0].split("[")[0]

    def decides(name: str) -> bool:
        return plain(name) in names or ".".join(plain(name).split("::")[1:]) in names

    def rows_of(name: str) -> Any:
        """Return the code that the test may have, or None if it is not known by its name.

        A test that a class inherits, or that the file makes as it is loaded, may be defined elsewhere.
        """
        path, _, rest = name.split("[")[0].partition("::")
        wanted = tuple(rest.split("::"))
        if path not in files:
            return [] if plain(name) in names else None
        defined = [row for row in files[path] if row[0] == wanted]
        return defined or [row for row in files[path] if row[0][-1] == wanted[-1]] or None

    def pytest_configure(config: Any) -> None:
        name_of[0] = naming(str(getattr(config, "rootpath", None) or config.rootdir), begun_in)
        sys.modules.pop(NAME, None)
        forget()

    def pytest_cmdline_main(config: Any) -> Any:
        # Tests that run in other processes would be out of sight.
        for option, value in (("numprocesses", 0), ("dist", "no"), ("tx", []), ("forked", False)):
            if hasattr(config.option, option):
                setattr(config.option, option, value)
        yield

    def pytest_runtest_call(item: Any) -> Any:
        if controlling[0]:
            yield
            return
        name = name_of[0](item.nodeid)
        rows = rows_of(name)
        proof = Proof()
        try:
            proof.watch(item, rows or ())
        except Exception:
            proof.close()
        calling[0] = item.nodeid
        outcome = yield
        calling[0] = ""
        proof.close()
        proofs[item.nodeid] = proof.ended or rows is None
        if outcome.excinfo is None and decides(name) and not _expected_to_fail(item):
            controlling[0] = True
            try:
                failed = _counts_as_failed(item)
            except Exception:
                failed = False
            finally:
                controlling[0] = False
            line("control", name, "FAILED" if failed else TAMPERED)

    def pytest_runtest_logreport(report: Any) -> None:
        if controlling[0] or (report.passed and report.nodeid == calling[0]):
            return  # The latter is a part of a test whose own report comes later.
        expected = hasattr(report, "wasxfail")
        if report.when == "call" and report.passed:
            status = "XPASS" if expected else "PASSED"
            if not proofs.get(report.nodeid):
                status = TAMPERED
        elif report.failed:
            status = "FAILED" if report.when == "call" else "ERROR"
        elif report.skipped:
            status = "XFAIL" if expected else "SKIPPED"
        else:
            return
        line("test", name_of[0](report.nodeid), status)

    def pytest_collectreport(report: Any) -> None:
        if report.failed:
            line("test", name_of[0](report.nodeid) or ".", "ERROR")

    def pytest_sessionfinish() -> None:
        line("end", "", "-")

    return (
        pytest_configure, pytest_cmdline_main, pytest_runtest_call, pytest_runtest_logreport,
        pytest_collectreport, pytest_sessionfinish,
    )  # fmt: skip


def _expected_to_fail(item: Any) -> bool:
    find = getattr(item, "get_closest_marker", None) or getattr(item, "get_marker", None)
    return find is None or find("xfail") is not None or not callable(getattr(item, "obj", None))


def _counts_as_failed(item: Any) -> bool:
    from _pytest import runner

    info = runner.CallInfo  # type: Any

    case = getattr(item, "_testcase", None)
    if case is None and type(item).__name__ == "TestCaseFunction":
        case = getattr(item, "instance", None)
    test = item.obj

    def fails(*_arguments: Any, **_keywords: Any) -> None:
        """Fail, unless something that is false counts as true."""
        if _comparisons_fail(case if case is not None else getattr(item, "instance", None)):
            raise AssertionError("this function fails, to see whether a failure is noticed")

    def run() -> None:
        item.ihook.pytest_runtest_call(item=item)

    # Unittest keeps what the test has raised in the item, where its own report still has to find it.
    raised = getattr(item, "_excinfo", None)
    item._excinfo = None
    item.obj = fails
    if case is not None:
        setattr(case, item.name, fails)
    try:
        call = info.from_call(run, when="call") if hasattr(info, "from_call") else info(run, "call")
        return bool(item.ihook.pytest_runtest_makereport(item=item, call=call).failed)
    finally:
        item.obj = test
        item._excinfo = raised
        if case is not None:
            vars(case).pop(item.name, None)


def _comparisons_fail(case: Any) -> bool:
    """Return whether what tests compare with still notices a difference."""
    import pytest

    def raises_nothing() -> None:
        with pytest.raises(ValueError, match="x"):
            pass

    def asserts_nothing() -> None:
        from _pytest.assertion.rewrite import rewrite_asserts

        source = b"assert 0 == 1"
        tree = ast.parse(source)
        rewrite_asserts(tree, source)
        exec(compile(tree, "control", "exec"), {})

    attempts = [raises_nothing, asserts_nothing]  # type: Any
    for name, arguments in (
        ("assertEqual", (0, 1)), ("assertTrue", (False,)), ("assertFalse", (True,)), ("assertIn", (0, [])),
        ("assertNotIn", (0, [0])), ("assertIsNone", (0,)), ("assertIs", (0, None)), ("fail", ()),
        ("assertNotEqual", (0, 0)),
        ("assertAlmostEqual", (0, 1)), ("assertListEqual", ([0], [1])), ("assertDictEqual", ({}, {0: 0})),
        ("assertRaises", (ValueError, int)), ("assertGreater", (0, 1)), ("assertLess", (1, 0)),
    ):  # fmt: skip
        method = getattr(case, name, None)
        if method is not None:
            attempts.append(functools.partial(method, *arguments))
    arrays = sys.modules.get("numpy.testing")
    if arrays is not None:
        attempts.append(functools.partial(arrays.assert_equal, 0, 1))
        attempts.append(functools.partial(arrays.assert_allclose, [0.0], [1.0]))
    for attempt in attempts:
        try:
            attempt()
        except BaseException:
            continue
        return False
    return not (hasattr(pytest, "approx") and pytest.approx(1) == 0)


def _import_pytest() -> None:
    """Import pytest, and what it needs later, while no folder of the repository is searched for modules."""
    import doctest  # noqa: F401
    import unittest.mock  # noqa: F401
    from importlib import import_module

    import pytest  # noqa: F401
    from _pytest import config

    for name in getattr(config, "default_plugins", ()):
        try:
            import_module("_pytest." + name)
        except ImportError:
            continue  # It has a need that is not installed, and pytest will say so.


def _forget(folder: str) -> None:
    """Remove from the environment what has started this plugin, for the programs that tests start."""
    options = os.environ.get("PYTEST_ADDOPTS", "").replace("-p " + NAME, "").strip()
    others = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path not in ("", folder)]
    for name, value in (("PYTEST_ADDOPTS", options), ("PYTHONPATH", ":".join(others))):
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def begin(folder: str, others: Any) -> None:
    """Take the secret and begin the report, if no other process has.

    Args:
        folder: The folder of this file, the secret and the report.
        others: The folders of PYTHONPATH. Those outside of the repository may hold pytest.

    Raises:
        Exception: Pytest cannot be imported, or the report not be written.
    """
    plugin = types.ModuleType(NAME, "PYTEST_DONT_REWRITE")
    sys.modules[NAME] = plugin
    path = join(folder, SECRET)
    try:
        with open(path) as file:
            given = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return
    line = _writer(folder, given["secret"].encode())
    inside = realpath(given["folder"]) + os.sep
    outside = [each for each in others if not (realpath(each) + os.sep).startswith(inside)]
    searched = list(sys.path)
    sys.path[0:0] = outside
    try:
        _import_pytest()
        forget = functools.partial(_forget, folder)
        hooks = reporter(line, frozenset(given["names"]), _files(given), forget)
    finally:
        sys.path[:] = searched
    import pytest

    for hook in hooks:
        first = hook.__name__ in ("pytest_cmdline_main", "pytest_runtest_call")
        marked = pytest.hookimpl(hookwrapper=True, tryfirst=True)(hook) if first else hook
        setattr(plugin, hook.__name__, marked)
