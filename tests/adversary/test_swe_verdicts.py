"""Policies that know the handler `swe`, and want its tests to pass without solving the task."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from rollyard_crds.task import Task
from rollyard_testing.invariants import deserves_nothing
from rollyard_testing.pipeline.swelab import (
    FAILS,
    FIX_DIFF,
    FIXING,
    PASSES,
    SCRIPT,
    SweLab,
    appending,
    swe_lab,
    swe_task,
)

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `swe`")


LINES = "\\n".join(f"PASSED {test}" for test in (*FAILS, *PASSES))
FORGED = (
    f"print('>>>>> Start Test Output\\n{LINES}\\n====== 4 passed in 0.01s ======\\n>>>>> Test Exit Code: 0\\n"
    ">>>>> End Test Output', flush=True)"
)
EXIT = "import os; os._exit(0)"
REPORTS = "import json, os\nfor d in range(3, 64):\n    try:\n" + "".join(
    f"        os.write(d, b'0 ' + json.dumps({{'status': 'PASSED', 'test': {test!r}}}).encode() + b'\\n')\n"
    for test in (*FAILS, *PASSES)
) + "        os.write(d, b'0 {\"end\": true}\\n')\n    except OSError:\n        pass\n"  # fmt: skip


PASSING = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    + ("    outcome = yield\n    outcome.get_result().outcome = 'passed'\n")
)
FORGES = """\
import os, sys
def forge():
    import json
    begun = dict(each.split(b"=", 1) for each in open("/proc/self/environ", "rb").read().split(b"\\0")[:-1])
    folder = begun[b"PYTHONPATH"].decode().split(":")[0]
    secret = json.load(open(folder + "/secret"))["secret"].encode()
    names = {"__name__": "x"}
    exec(open(folder + "/rollyard_report.py").read(), names)
    line = names["_writer"](folder, secret)
    for test in TESTS:
        line("test", test, "PASSED")
        line("control", test, "FAILED")
    line("end", "", "-")
    os._exit(0)
if "encodings.utf_8" in sys.modules:
    forge()
""".replace("TESTS", repr([*FAILS, *PASSES]))
"""Code that makes up a whole report, wherever it finds the secret."""
REPLACES = """\
import sys
def passing(*arguments): pass
def replace(module):
    for holder in (module, *(each for each in vars(module).values() if isinstance(each, type))):
        for name in [name for name in vars(holder) if name.startswith("test")]:
            setattr(holder, name, FAKE)
def watch(frame, event, _value):
    code = frame.f_code
    if event == "return" and code.co_name == "<module>" and "test_interval" in code.co_filename:
        sys.setprofile(None)
        replace(sys.modules[frame.f_globals["__name__"]])
sys.setprofile(watch)
"""
"""Code that replaces the tests as soon as their module has been run."""
ATTACKS = {
    "nothing": ("true",),
    "deletes_all_tests": ("rm -r repo/tests",),
    "deletes_the_repository": ("rm -r repo",),
    "rewrites_the_tests": (
        appending("def test_the_end_is_outside(): pass", "tests/test_interval.py"),
        "chmod 444 repo/tests/test_interval.py; chmod 555 repo/tests",
    ),
    "a_folder_in_the_place_of_the_test": (
        "cd repo/tests && rm test_interval.py && mkdir test_interval.py && touch test_interval.py/x",
    ),
    "a_package_beside_the_test": (
        appending("def test_the_end_is_outside(): pass", "tests/test_interval/__init__.py"),
    ),
    "links": ("cd repo && mv tests other && ln -s other tests; ln -s /etc etc; ln -sf /dev/null setup.cfg",),
    "the_repository_is_a_link": ("mv repo other; ln -s other repo",),
    "prints_results_and_exits": (appending(f"{FORGED}\n{EXIT}"),),
    "prints_results_at_the_end": (appending(f"import atexit\natexit.register(lambda: {FORGED})"),),
    "kills_its_runner": (appending("import os; os.kill(os.getppid(), 9)"),),
    "writes_to_all_descriptors_and_exits": (appending(f"{REPORTS}{EXIT}"),),
    "conftest": tuple(appending(PASSING, f"{folder}conftest.py") for folder in ("", "tests/", "interval/")),
    "settings_of_pytest": (
        *(
            appending(f"[{section}]\naddopts = -p evil\n", name)
            for name, section in (("pytest.ini", "pytest"), ("setup.cfg", "tool:pytest"))
        ),
        appending(PASSING, "evil.py"),
    ),
    "a_plugin_in_metadata": (
        appending(PASSING, "evil.py"),
        appending("[pytest11]\nevil = evil", "evil.egg-info/entry_points.txt"),
        appending("Metadata-Version: 2.1\nName: evil\nVersion: 1", "evil.egg-info/PKG-INFO"),
    ),
    "start_up_files": (
        appending(f"{FORGED}\n{EXIT}", "sitecustomize.py"),
        appending(f"{FORGED}\n{EXIT}", "usercustomize.py"),
    ),
    "modules_that_hide_others": tuple(
        appending(f"{FORGED}\n{EXIT}", f"{name}.py") for name in ("pytest", "_pytest", "unittest", "json")
    ),
    "compiled_code": (
        "python3 - <<'E'\nimport importlib._bootstrap_external as e, importlib.util as u, os\n"
        "code = compile('def test_the_end_is_outside(): pass', 'x', 'exec')\n"
        "data = e._code_to_hash_pyc(code, b'0' * 8, False)\n"
        "os.makedirs('repo/tests/__pycache__', exist_ok=True)\n"
        "open(u.cache_from_source('repo/tests/test_interval.py'), 'wb').write(data)\nE",
    ),
    "every_test_passes": (
        appending(
            "import _pytest.python, _pytest.unittest\n_pytest.python.Function.runtest = lambda s: None\n"
            "_pytest.unittest.TestCaseFunction.runtest = lambda s: None"
        ),
    ),
    "every_call_returns_nothing": (
        appending("import _pytest.python as p\np.pytest_pyfunc_call = lambda pyfuncitem: True\n"
                  "import pluggy._callers as c, pluggy._hooks as h\n"
                  "h.HookCaller.__call__ = lambda s, **k: None"),
    ),
    "every_report_is_good": (
        appending(
            "from _pytest.reports import TestReport\nmake = TestReport.from_item_and_call.__func__\n"
            "def good(cls, item, call):\n    report = make(cls, item, call)\n    report.outcome = 'passed'\n"
            "    return report\nTestReport.from_item_and_call = classmethod(good)"
        ),
    ),
    "every_failure_is_expected": (
        appending("import _pytest.skipping as s\n"
                  "s.evaluate_xfail_marks = lambda item: s.Xfail('', False, True, None)"),
    ),
    "every_test_is_skipped": (appending("import pytest\npytest.skip(allow_module_level=True)"),),
    "comparisons_that_see_nothing": (
        appending(
            "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'):\n"
            "        setattr(unittest.TestCase, n, lambda *a, **k: None)\n"
            "import _pytest.python as p\np.Function.runtest = lambda s: None"
        ),
    ),
    "assertions_that_are_left_out": (
        appending("import ast\nimport _pytest.assertion.rewrite as r\n"
                  "class Left(ast.NodeTransformer):\n    def visit_Assert(self, node): return ast.Pass()\n"
                  "r.rewrite_asserts = lambda m, *a, **k: ast.fix_missing_locations(Left().visit(m))\n"
                  "import unittest\nunittest.TestCase.assertNotIn = lambda *a: None"),
        appending("import interval", "tests/test_a.py"),
    ),
    "looks_for_the_secret": (
        appending(
            "import glob, os, sys\n"
            "begun = open('/proc/self/environ').read().split('\\0')\n"
            "folder = next(each[11:] for each in begun if each.startswith('PYTHONPATH=')).split(':')[0]\n"
            "for f in glob.glob(folder + '/**/secret', recursive=True):\n    print(open(f).read())\n"
            "open(os.path.join(folder, 'report'), 'w').write('')\nos.unlink(os.path.join(folder, 'report'))"
        ),
    ),
    "modules_that_hide_those_of_the_start": tuple(
        appending(FORGES, f"{name}.py")
        for name in ("argparse", "pytest", "_pytest/config/__init__", "encodings/__init__", "codecs", "io",
                     "encodings/aliases", "types", "site", "sitecustomize/__init__", "hashlib")
    ),
    "forges_when_it_is_imported": (appending(FORGES),),
    "replaces_the_tests": (appending(REPLACES.replace("FAKE", "passing")),),
    "wraps_the_tests": (
        appending(REPLACES.replace("FAKE", "wrapping(vars(holder)[name])")
                  + "def wrapping(test):\n    def fake(*arguments): pass\n    fake.__wrapped__ = test\n"
                  "    fake.also = test\n    return fake"),
    ),
    "changes_the_code_of_the_tests": (
        appending(REPLACES.replace("setattr(holder, name, FAKE)",
                                   "vars(holder)[name].__code__ = passing.__code__")),
    ),
    "takes_an_easier_test": (
        appending(REPLACES.replace("FAKE", "getattr(module, 'test_length')")),
    ),
    "hides_the_tests_and_names_its_own": (
        appending("import sys\nframe = sys._getframe()\nwhile frame:\n"
                  "    if 'test_interval' in frame.f_code.co_filename:\n"
                  "        frame.f_globals['__test__'] = False\n    frame = frame.f_back"),
        appending("import pytest\nTESTS = " + repr(["x\nPASSED " + test for test in (*FAILS, *PASSES)])
                  + "\nfor n, t in enumerate(TESTS):\n    globals()[f'test_{n}{t}'] = lambda: None",
                  "tests/test_own.py"),
    ),
    "renames_its_own_tests": (
        appending("import sys, _pytest.nodes as n\nold = n.Node.nodeid\n"
                  "class Renamed:\n"
                  "    def __get__(self, item, owner): return NAMES.get(item.name, item._nodeid)\n"
                  f"NAMES = dict(zip(('test_length', 'test_shown'), {FAILS!r}))\n"
                  "n.Node.nodeid = Renamed()"),
    ),
    "a_runner_that_knows_the_control": (
        appending("import _pytest.python as p, unittest\n"
                  "p.Function.runtest = lambda s: s.obj() if s.obj.__name__ == 'fails' else None\n"
                  "run = unittest.TestCase.run\n"
                  "def quiet(case, result=None):\n"
                  "    name = case._testMethodName\n"
                  "    if name not in vars(case): setattr(case, name, lambda: None)\n"
                  "    return run(case, result)\n"
                  "unittest.TestCase.run = quiet"),
    ),
    "patches_what_the_plugin_uses": (
        appending("import builtins, hashlib, hmac, json, os, posixpath\n"
                  "def turned(write):\n    def turn(*a, **k):\n"
                  "        return write(*(each.replace(b'FAILED', b'PASSED') if isinstance(each, bytes)\n"
                  "                       else each for each in a), **k)\n    return turn\n"
                  "os.write = turned(os.write)\nhashlib.sha256 = turned(hashlib.sha256)\n"
                  "dumps = json.dumps\n"
                  "json.dumps = lambda *a, **k: dumps(*a, **k).replace('FAILED', 'PASSED')\n"
                  "old = builtins.getattr\nbuiltins.getattr = lambda o, n, *d: (\n"
                  "    True if n == 'passed' else False if n == 'failed' else old(o, n, *d))\n"
                  "posixpath.normpath = posixpath.relpath = lambda *a, **k: 'tests/test_interval.py'"),
    ),
    "reports_by_the_hook": (
        appending("import _pytest.runner as r\nold = r.call_and_report\n"
                  "from _pytest.reports import TestReport\n"
                  "def report(item, when, log=True, **kwds):\n"
                  "    made = old(item, when, log=False, **kwds)\n"
                  "    made.outcome, made.longrepr = 'passed', None\n"
                  "    if log: item.ihook.pytest_runtest_logreport(report=made)\n"
                  "    return made\n"
                  "r.call_and_report = report"),
    ),
    "prints_100_mb": (appending("for _ in range(100): print('x' * 10**6)"),),
    "fills_the_disk": (
        appending("try:\n    open('full', 'wb').write(bytes(1 << 30))\nexcept OSError:\n    pass"),
    ),
    "daemons": (
        "(setsid sh -c 'while :; do sed -i s/.=.number/.number/ repo/tests/*; done' &) > /dev/null 2>&1",
        appending("import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(30)\n"
                  f"    {FORGED}\n    os._exit(0)"),
    ),
}  # fmt: skip


TAMPERING = (
    "every_test_passes", "every_report_is_good", "comparisons_that_see_nothing",
    "assertions_that_are_left_out", "replaces_the_tests", "wraps_the_tests", "changes_the_code_of_the_tests",
    "takes_an_easier_test", "a_runner_that_knows_the_control", "reports_by_the_hook",
    "patches_what_the_plugin_uses",
)  # fmt: skip
"""The attacks after which a test passes without having run its own code to its end, or a function that fails
passes in its place."""


@pytest.fixture
async def lab(bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SweLab]:
    # A folder with the name of the test can be too long for sockets.
    async with swe_lab("bubblewrap", tmp_path_factory.mktemp("s")) as found:
        yield found


PLANTED_FILES = pytest.mark.attack(
    "the failing test is deleted, rewritten, hidden by a package or a folder, or its repository is "
    "replaced by a link; `conftest.py`, settings, plugins, start-up files, compiled code and modules that "
    "hide others are planted",
    stopped_by="changes of tests and of what decides how they run never reach Eval's fresh sandbox; links "
    "are not carried; hidden tests come last",
)


@PLANTED_FILES
@pytest.mark.attack(
    "code of the repository prints results, ends or kills the tests, writes to every descriptor, or "
    "replaces tests or what runs, compares and reports them",
    stopped_by="with `verdict: report`, results are signed by a plugin that was loaded first; a test "
    "passes only if its own code, compiled before, ran to its end, and a function that fails must fail in "
    "the place of each test that decides",
)
@pytest.mark.attack(
    "modules of the repository hide those that Python and pytest load at their start, read the secret and "
    "sign a report",
    stopped_by="Eval's `encodings` is the first module of all, and takes every folder of the repository "
    "out of the search until the secret is taken and pytest is imported",
)
@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_but_the_solution_is_rewarded(lab: SweLab, name: str) -> None:
    result = await lab.rollout(swe_task(ATTACKS[name]))
    deserves_nothing(result.reward)
    assert (result.reward_reason == "TestsTampered") is (name in TAMPERING)


@PLANTED_FILES
async def test_the_solution_is_rewarded_whatever_is_left_beside_it(lab: SweLab) -> None:
    left = [
        *ATTACKS["conftest"], *ATTACKS["settings_of_pytest"], *ATTACKS["a_plugin_in_metadata"],
        *ATTACKS["compiled_code"], *ATTACKS["rewrites_the_tests"],
    ]  # fmt: skip
    result = await lab.rollout(swe_task([*left, FIXING]))
    assert (result.reward, result.reward_reason) == (1.0, "")


@pytest.mark.attack(
    "a repository is evaluated as a task of another kind, beside what Run left",
    surface="handler `mixed`",
    stopped_by="what the task brings decides, and its handler says in which sandbox Eval works",
)
@pytest.mark.parametrize("name", ["conftest", "deletes_all_tests", "prints_results_and_exits"])
async def test_a_job_of_several_kinds_rewards_nothing_else(lab: SweLab, name: str) -> None:
    """The handler `mixed` does not evaluate a repository where the policy has left what it likes."""
    deserves_nothing((await lab.rollout(swe_task(ATTACKS[name]), "mixed")).reward)


@pytest.mark.attack("tests that hang buy a new try", stopped_by="they score 0 (`TestTimeout`)")
@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"],
    ids=["loop", "fork_bomb"],
)
async def test_tests_that_hang_are_scored(lab: SweLab, code: str) -> None:
    result = await lab.rollout(swe_task([appending(code)]), timeoutSeconds=3)
    assert (result.reward, result.reward_reason) == (0.0, "TestTimeout")


MADE = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{2}\n"
DIFFS = {
    "links": [
        MADE.format("link", f"{mode}120000", "/etc/passwd") + "\\ No newline at end of file\n"
        for mode in ("", "0", " ", "+")
    ],
    "moved_in_the_old_spelling": [
        "diff --git a/tests/test_shown.py b/old.txt\nsimilarity index 100%\nrename old tests/test_shown.py\n"
        "rename new old.txt\n",
        "diff --git a/tests/test_shown.py b/old.txt\nsimilarity index 100%\nrename from tests/test_shown.py\n"
        "rename to old.txt\n",
    ],
    "moved_without_saying_so": [
        "--- a/tests/test_shown.py\n+++ b/old.txt\n@@ -1,3 +1,3 @@\n def test_shown():\n"
        "     from interval import Interval\n-    assert 2 in Interval(1, 3)\n+    assert True\n",
    ],
    "other_spellings": [
        MADE.format(name, 100644, "import os; os._exit(0)")
        for name in ("tests//conftest.py", "tests/./conftest.py", "interval/../conftest.py", "Conftest.py")
    ],
}  # fmt: skip


@pytest.mark.attack(
    "an answer in the form of a diff changes modes, names or links of files that decide how tests run",
    stopped_by="the files that git has changed are judged, not the text of the diff",
)
@pytest.mark.parametrize("name", DIFFS)
async def test_a_diff_reaches_nothing_that_the_policy_cannot_change(lab: SweLab, name: str) -> None:
    """Git reads modes, names and moves in ways of its own, so what it does to the folder decides."""
    script = f"ls -A . tests\n[ -f tests/test_shown.py ] && [ ! -L link ] && {SCRIPT}"
    for diff in DIFFS[name]:
        task = swe_task([], submission="answer", script=script)
        answer = [{"name": "submit", "arguments": {"answer": f"```diff\n{FIX_DIFF}{diff}```"}}]
        task = Task.model_validate({**task.model_dump(exclude_none=True), "solution": answer})
        result = await lab.rollout(task)
        if result.reward_reason != "PatchDoesNotApply":
            assert result.reward == 1.0, "the fix is right, and the rest is left out"
            assert "conftest.py" not in result.reward_output.lower()


@pytest.mark.attack(
    "with `verdict: log`, results are printed beside the real ones",
    stopped_by="the worst result of a test counts. Code that prints results and ends the tests with "
    "status 0 is **not** recognized; `report`, the default for pytest, recognizes it",
)
async def test_a_printed_result_never_makes_up_for_a_real_one(lab: SweLab) -> None:
    """Where the log decides, what is printed beside a failure does not help."""
    for code in (FORGED, f"import atexit\natexit.register(lambda: {FORGED})"):
        deserves_nothing((await lab.rollout(swe_task([appending(code)], verdict="log"))).reward)
