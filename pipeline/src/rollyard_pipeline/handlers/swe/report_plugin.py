"""A plugin of pytest that reports results where no program can forge them by printing, patching or importing.

`report_start` runs this file before anything of the repository, with builtins of its own. It takes the secret
and removes it, imports pytest, and compiles the files of the tests that decide, while nobody can have changed
what compiles them. It is for Python 3.5 and later, and for every version of pytest since 3.

Each line of the report is signed with the secret, and signatures are chained, so that no line can be added,
left out or repeated from outside this module. Code of the repository runs in the same process, and could
make every test pass by replacing tests, what runs them or what compares values. Therefore:

- A test of a file that decides has passed only if its own code, as compiled here, was run to its end, as
  often as it was begun. For the time of the call, its function has code that calls the plugin where it begins
  and where it ends.
- What tests compare with, such as the methods of unittest, must be what it was before.
- After a test that passed, a function that fails is reported in its place. The report says whether it counted
  as failed.
"""

import ast
import builtins
import functools
import importlib.util
import json
import os
import sys
import types
import warnings
from hashlib import sha256
from os import getpid, write
from os.path import join, normpath, realpath, relpath
from typing import Any

NAME = "rollyard_report"
SECRET = "secret"
REPORT = "report"
TAMPERED = "TAMPERED"
MARK = "@rollyard"
"""The name by which the code of a test calls the plugin."""
_MAX_FILES = 4096
_COMPARING = (
    "abs all any dict getattr hasattr isinstance issubclass len list max min repr set sorted str sum tuple"
)
"""The builtins with which tests compare."""
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
    process = getpid()

    def line(kind: str, test: str, status: str) -> None:
        if getpid() != process:
            return  # It is a copy of the process, which may only try what the report would say.
        # Hexadecimal digits keep a name in its place, whatever it is made of.
        name = test.encode("utf-8", "surrogatepass").hex() or "-"
        text = " ".join((kind, name, status)).encode()
        last[0] = sign(secret, last[0], text)
        write(file, last[0] + b" " + text + b"\n")

    return line


class _Marks(ast.NodeTransformer):
    """Lets each function of a module call the plugin where it begins and where it ends."""

    def visit_FunctionDef(self, node: Any) -> Any:
        body = [_ReturnMarks().visit(each) for each in node.body]
        node.body = [statement for each in body for statement in (each if isinstance(each, list) else [each])]
        start = int(ast.get_docstring(node, clean=False) is not None)
        node.body.insert(start, _mark(True, node.body[min(start, len(node.body) - 1)]))
        node.body.append(_mark(False, node.body[-1]))
        for each in node.body:
            if isinstance(each, _DEFINES):
                self.visit(each)
            else:
                self.generic_visit(each)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


class _ReturnMarks(ast.NodeTransformer):
    """Lets the `return` statements of one function call the plugin, but not those of functions in it."""

    def visit(self, node: Any) -> Any:
        return node if isinstance(node, _DEFINES) else super().visit(node)

    def visit_Return(self, node: Any) -> Any:
        if node.value is None:
            return [_mark(False, node), node]
        node.value = _mark(False, node, node.value).value
        return node


def _mark(begins: bool, at: Any, value: Any = None) -> Any:
    statement = ast.parse("_(" + repr(begins) + ")").body[0]  # type: Any
    statement.value.func.id = MARK
    for node in ast.walk(statement):
        ast.copy_location(node, at)
    if value is not None:
        statement.value.args.append(value)
    return statement


class CodeRow:
    """The code of one function.

    Attributes:
        path: Its name, below those of the classes and functions that it is in.
        code: The code as it is compiled for a test.
        marked: The same code, which calls the plugin.
        decorated: Whether the function or its class has decorators.
        xfail: Whether the function, its class or its module speaks of an expected failure.
    """

    def __init__(self, path: Any, code: Any, marked: Any, flags: Any) -> None:
        self.path, self.code, self.marked = path, code, marked
        self.decorated, self.xfail = flags


def _flags(node: Any, path: Any, above: Any, collected: Any) -> None:
    """Collect for each function and class whether it is decorated, and speaks of an expected failure."""
    body = getattr(node, "body", ())
    for each in body if isinstance(body, list) else ():
        if isinstance(each, ast.Assign) and "pytestmark" in ast.dump(each) and "xfail" in ast.dump(each):
            above = (above[0], True)
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            _flags(each, path, above, collected)
            continue
        spoken = each.decorator_list if isinstance(each, ast.ClassDef) else [each]
        xfail = above[1] or any("xfail" in ast.dump(part) for part in spoken)
        below = (*path, each.name)
        before = collected.get(below, (False, False))
        collected[below] = (above[0] or before[0] or bool(each.decorator_list), xfail or before[1])
        _flags(each, below, collected[below] if isinstance(each, ast.ClassDef) else (False, xfail), collected)


def _rows(code: Any, marked: Any, path: Any, flags: Any) -> Any:
    """Return a row for each code object in `code`."""
    kind = types.CodeType
    inner = [each for each in code.co_consts if type(each) is kind]
    others = [each for each in marked.co_consts if type(each) is kind]
    rows = []  # type: Any
    for plain_code, marked_code in zip(inner, others):  # noqa: B905
        below = (*path, plain_code.co_name)
        rows.append(
            CodeRow(
                below,
                plain_code,
                _with_functions_of(marked_code, plain_code),
                flags.get(below, (False, False)),
            )
        )
        rows += _rows(plain_code, marked_code, below, flags)
    return rows


def _with_functions_of(marked: Any, code: Any) -> Any:
    """Return marked code in which the functions that it defines are as they were, from Python 3.8 on."""
    kind = types.CodeType
    inner = iter([each for each in code.co_consts if type(each) is kind])
    consts = tuple(next(inner) if type(each) is kind else each for each in marked.co_consts)
    return marked.replace(co_consts=consts) if hasattr(marked, "replace") else marked


def compiled(source: bytes, path: str) -> Any:
    """Return the rows of a file, as pytest compiles it and as Python does."""
    from _pytest.assertion.rewrite import rewrite_asserts

    rewrite = rewrite_asserts  # type: Any
    rows = []  # type: Any
    flags = {}  # type: Any
    _flags(ast.parse(source, path), (), (False, False), flags)
    for rewritten in (True, False):
        pair = []
        for marks in (False, True):
            tree = ast.parse(source, path)
            if marks:
                tree = _Marks().visit(tree)
            if rewritten and "source" in rewrite.__code__.co_varnames[:2]:
                rewrite(tree, source, path, None)
            elif rewritten:
                rewrite(tree, path, None)
            pair.append(compile(tree, path, "exec", dont_inherit=True))
        rows += _rows(pair[0], pair[1], (), flags)
    return rows


def _sources(folder: str, paths: Any) -> Any:
    """Return the content of modules by their paths. The path of a folder stands for all modules in it."""
    sources = {}  # type: Any
    for path in paths:
        for begin in (folder, os.getcwd()):
            whole = join(begin, path)
            names = [whole]
            for parent, _folders, files in os.walk(whole):
                names += [join(parent, name) for name in sorted(files)]
            for name in [name for name in names if name.endswith(".py")][:_MAX_FILES]:
                try:
                    with open(name, "rb") as file:
                        sources[normpath(name)] = sources[realpath(name)] = file.read()
                except OSError:
                    continue  # It is not there, or belongs to nobody here.
    return sources


class DecidingFiles:
    """The code of the tests that decide, and of what they may inherit tests from.

    Args:
        task: What Eval says of the tests.
    """

    def __init__(self, task: Any) -> None:
        self.rows = {}  # type: Any
        self.inherited = {}  # type: Any
        self.sources = _sources(task["folder"], task["folders"])
        self.inside = (task["folder"] + "/", realpath(task["folder"]) + "/")
        decide = _sources(task["folder"], task["files"])
        self.sources.update(decide)
        for path, source in decide.items():
            rows = self._compiled(source, path)
            if rows is not None:
                self.rows[relpath(path)] = self.rows[relpath(realpath(path))] = rows

    def _compiled(self, source: bytes, path: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return compiled(source, path)
            except (SyntaxError, ValueError):
                return None  # Pytest will not load it either.

    def at(self, path: str) -> Any:
        """Return the rows of a file from which a class inherits tests. It cannot be one of the policy's."""
        if path not in self.sources:
            if self._is_inside(path):
                return []
            try:
                with open(path, "rb") as file:
                    self.sources[path] = file.read()
            except OSError:
                return []
        if path not in self.inherited:
            self.inherited[path] = self._compiled(self.sources[path], path) or []
        return self.inherited[path]

    def is_a_test(self, path: str) -> bool:
        """Return whether a file is one of the tests, or none of the repository's."""
        return path in self.sources or not self._is_inside(path)

    def _is_inside(self, path: str) -> bool:
        return not path.startswith("/") or path.startswith(self.inside)


def _functions(item: Any) -> Any:
    """Return the functions that a test is made of, its own first, and how many of them are not wrapped."""
    name = getattr(item, "originalname", None) or item.name.split("[")[0]
    left = [(getattr(item, "obj", None), 0), (getattr(getattr(item, "cls", None), name, None), 0)]  # type: Any
    functions = []  # type: Any
    while left and len(functions) < 64:
        function, depth = left.pop(0)
        if type(function) is types.MethodType:
            function = function.__func__
        inner = []  # type: Any
        if type(function) is functools.partial:
            inner.append(function.func)
        elif type(function) is types.FunctionType:
            if any(function is known for known, _ in functions):
                continue
            functions.append((function, depth))
            for cell in function.__closure__ or ():
                try:
                    inner.append(cell.cell_contents)
                except ValueError:
                    continue  # It is empty.
        # Decorators may also be objects, and Hypothesis keeps the function in one.
        fields = getattr(function, "__dict__", None)
        if type(fields) is dict and not isinstance(function, type) and depth < 4:
            inner += fields.values()
        left += [(each, depth + 1) for each in inner]
        del left[256:]
    return functions


class Proof:
    """Whether the code of one test, as it was compiled before, is run to its end in a call."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.row = self.function = self.code = self.instance = None  # type: Any
        self.tracing = (None, None)  # type: Any

    def watch(self, item: Any, functions: Any, rows: Any, mark: Any) -> None:
        """Find the function of the test that has one of these codes, and let it call where it ends."""
        for function, depth in functions:
            for row in rows:
                if function.__code__ != row.code or (depth and not row.decorated):
                    continue
                obj = getattr(item, "obj", None)
                if type(obj) is types.MethodType and obj.__func__ is function:
                    self.instance = obj.__self__
                if type(function.__globals__) is dict:
                    self.row, self.function, self.code = row, function, function.__code__
                    function.__globals__[MARK] = mark
                    function.__code__ = row.marked
                return

    def complete(self) -> bool:
        """Return whether the test ended, as often as it began. What decorates one may begin it again."""
        return self.ended > 0 and (self.ended == self.begun or self.row.decorated)

    def close(self) -> None:
        """Give the function its own code again."""
        if self.function is not None:
            self.function.__code__ = self.code
            self.function.__globals__.pop(MARK, None)


def marker(current: Any) -> Any:
    """Return the function that the code of a test calls. It looks at who calls.

    Args:
        current: A list with the proof of the test that runs.
    """
    frame_at, get_trace, set_trace = sys._getframe, sys.gettrace, sys.settrace
    get_profile, set_profile = sys.getprofile, sys.setprofile

    def mark(begins: Any, value: Any = None) -> Any:
        proof = current[0]
        frame = frame_at(1)
        if proof is None or proof.row is None or frame.f_code is not proof.row.marked:
            return value
        if frame.f_globals is not proof.function.__globals__:
            return value  # The code of the test runs elsewhere.
        if begins and proof.instance is not None:
            own = frame.f_locals.get(frame.f_code.co_varnames[0])
            if own is not proof.instance:
                return value  # The test runs with another `self`.
        if begins:
            # What traces a test could also change its variables, and where it continues.
            if proof.begun == 0:
                proof.tracing = (get_trace(), get_profile())
            set_trace(None)
            set_profile(None)
            proof.begun += 1
        else:
            proof.ended += 1
        return value

    def restore(proof: Any) -> None:
        if proof.begun:
            set_trace(proof.tracing[0])
            set_profile(proof.tracing[1])

    return mark, restore


def _comparing() -> Any:
    """Return what tests compare with, as triples of an owner, a name and the object of this name."""
    from unittest import case, mock

    import pytest
    from _pytest import outcomes

    owners = [each for each in vars(case).values() if isinstance(each, type)]  # type: Any
    owners += [mock._patch, outcomes, pytest]
    if importlib.util.find_spec("pytest_mock") is None:  # It has better messages for the same checks.
        owners += [mock.NonCallableMock, mock.CallableMixin]
    for name in ("python_api", "raises"):
        module = sys.modules.get("_pytest." + name)
        if module is not None:
            owners += [module] + [each for each in vars(module).values() if isinstance(each, type)]
    rows = []
    for owner in owners:
        for name, value in vars(owner).items():
            code = getattr(value, "__code__", None)
            if isinstance(value, (types.FunctionType, type)) and not name.startswith("__a"):
                rows.append((owner, name, value, code))
    return rows + [(builtins, name, vars(builtins)[name], None) for name in _COMPARING.split()]


def _unchanged(comparing: Any) -> bool:
    return all(
        vars(owner).get(name) is value and getattr(value, "__code__", None) is code
        for owner, name, value, code in comparing
    )


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


def plain(name: str) -> str:
    """Return the name of a test without its parameters, and without what follows the name of its function."""
    path, colons, rest = name.split("[")[0].partition("::")
    return path + colons + (rest.split() or [""])[0]


def reporter(line: Any, names: Any, cut: Any, files: Any, forget: Any) -> Any:
    """Return the hooks of one run of pytest.

    Args:
        line: Writes a line of the report.
        names: The tests that decide, without their parameters, as pytest names them or with dots.
        cut: The tests of whose cases a data set has cut names. Each of these cases has to be reported.
        files: The code of their files.
        forget: Is called when pytest has read the environment.
    """
    begun_in = os.getcwd()
    name_of = [naming(begun_in, begun_in)]
    calling = [""]
    verdicts = {}  # type: Any
    current = [None]  # type: Any
    mark, restore = marker(current)
    comparing = _comparing()

    def decides(name: str) -> bool:
        return plain(name) in names or ".".join(plain(name).split("::")[1:]) in names

    def rows_of(name: str, functions: Any) -> Any:
        """Return the code that the test may have, or None if its file does not decide."""
        path, _, rest = plain(name).partition("::")
        own = tuple(rest.split("::"))
        known = files.rows.get(path)
        if not functions or (known is None and not decides(name)):
            return None
        defined = [row for row in known or () if row.path == own]
        if defined:
            return defined
        # A class may inherit the test, and a module make it.
        others = [row for row in known or () if row.path[-1] == own[-1]]
        return others + files.at(functions[0][0].__code__.co_filename)

    def skips_by_itself(excinfo: Any) -> bool:
        """Return whether what skips a test is a test, or what tests use, and not the code that they test."""
        frames = []
        trace = excinfo[2]
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        raising = [path for path in frames if "_pytest" not in path]
        return not raising or files.is_a_test(raising[-1])

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

    def pytest_collection_finish(session: Any) -> None:
        for item in session.items:
            name = name_of[0](item.nodeid)
            if plain(name) in cut:
                line("collected", name, "-")

    def pytest_runtest_call(item: Any) -> Any:
        name = name_of[0](item.nodeid)
        rows = None  # type: Any
        proof = Proof()
        try:
            functions = _functions(item)
            rows = rows_of(name, functions)
            proof.watch(item, functions, rows or (), mark)
        except Exception:
            rows = []
        calling[0], current[0] = item.nodeid, proof
        before = rows is None or _unchanged(comparing)
        outcome = yield
        calling[0], current[0] = "", None
        restore(proof)
        proof.close()
        verdict = {"PASSED": True, "SKIPPED": True, "XFAIL": True}
        if rows is not None:
            verdict["PASSED"] = before and _unchanged(comparing) and proof.complete()
            verdict["SKIPPED"] = outcome.excinfo is None or skips_by_itself(outcome.excinfo)
            verdict["XFAIL"] = proof.row is not None and proof.row.xfail
        verdicts[item.nodeid] = verdict
        if outcome.excinfo is None and decides(name) and not _expected_to_fail(item):
            try:
                failed = _counts_as_failed(item)
            except Exception:
                failed = True  # What the test has patched is still in force. Pytest would end here.
            line("control", name, "FAILED" if failed else TAMPERED)

    def pytest_runtest_logreport(report: Any) -> None:
        if report.passed and report.nodeid == calling[0]:
            return  # It is of a part of a test, whose own report comes later.
        expected = hasattr(report, "wasxfail")
        verdict = verdicts.get(report.nodeid, {})
        if report.when == "call" and report.passed:
            status = "XPASS" if expected else "PASSED"
            if not verdict.get("PASSED"):
                status = TAMPERED
        elif report.failed:
            status = "FAILED" if report.when == "call" else "ERROR"
        elif report.skipped:
            status = "XFAIL" if expected else "SKIPPED"
            if not verdict.get(status, status == "SKIPPED"):
                status = "FAILED"  # The code that is tested has skipped the test, or expected its failure.
        else:
            return
        line("test", name_of[0](report.nodeid), status)

    def pytest_collectreport(report: Any) -> None:
        if report.failed:
            line("test", name_of[0](report.nodeid) or ".", "ERROR")

    def pytest_sessionfinish() -> None:
        line("end", "", "-")

    return (
        pytest_configure,
        pytest_cmdline_main,
        pytest_collection_finish,
        pytest_runtest_call,
        pytest_runtest_logreport,
        pytest_collectreport,
        pytest_sessionfinish,
    )


def _expected_to_fail(item: Any) -> bool:
    find = getattr(item, "get_closest_marker", None) or getattr(item, "get_marker", None)
    return find is None or find("xfail") is not None or not callable(getattr(item, "obj", None))


def _counts_as_failed(item: Any) -> bool:
    """Return whether an assertion that fails in place of the test is noticed, reported and counted."""
    from _pytest import runner

    info = runner.CallInfo  # type: Any

    def fails() -> None:
        """Fail, unless something that is false counts as true."""
        if _comparisons_fail(getattr(item, "_testcase", None) or getattr(item, "instance", None)):
            raise AssertionError("this function fails, to see whether a failure is noticed")

    # Unittest keeps what the test has raised in the item, where its own report still has to find it.
    raised = getattr(item, "_excinfo", None)
    item._excinfo = None
    try:
        call = info.from_call(fails, when="call") if hasattr(info, "from_call") else info(fails, "call")
        return bool(item.ihook.pytest_runtest_makereport(item=item, call=call).failed)
    finally:
        item._excinfo = raised


def _comparisons_fail(case: Any) -> bool:
    """Return whether what tests compare with still notices a difference."""
    import unittest

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
        ("assertEqual", (0, 1)),
        ("assertTrue", (False,)),
        ("assertFalse", (True,)),
        ("assertIn", (0, [])),
        ("assertNotIn", (0, [0])),
        ("assertIsNone", (0,)),
        ("assertIs", (0, None)),
        ("fail", ()),
        ("assertNotEqual", (0, 0)),
        ("assertAlmostEqual", (0, 1)),
        ("assertListEqual", ([0], [1])),
        ("assertDictEqual", ({}, {0: 0})),
        ("assertRaises", (ValueError, int)),
        ("assertGreater", (0, 1)),
        ("assertLess", (1, 0)),
    ):
        method = getattr(case, name, None)
        if method is not None and isinstance(case, unittest.TestCase):
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
            task = json.load(file)
        os.unlink(path)
    except (OSError, ValueError):
        return
    line = _writer(folder, task["secret"].encode())
    inside = realpath(task["folder"]) + os.sep
    outside = [each for each in others if not (realpath(each) + os.sep).startswith(inside)]
    searched = list(sys.path)
    sys.path[0:0] = outside
    try:
        _import_pytest()
        forget = functools.partial(_forget, folder)
        names, cut = frozenset(task["names"]), frozenset(task["cut"])
        hooks = reporter(line, names, cut, DecidingFiles(task), forget)
    finally:
        sys.path[:] = searched
    import pytest

    for hook in hooks:
        first = hook.__name__ in ("pytest_cmdline_main", "pytest_runtest_call")
        marked = pytest.hookimpl(hookwrapper=True, tryfirst=True)(hook) if first else hook
        setattr(plugin, hook.__name__, marked)
