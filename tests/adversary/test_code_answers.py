"""Programs of a policy that knows the handler `code`, and wants to be scored without solving the task."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import TaskSource
from rollyard_pipeline.handlers import StageContext
from rollyard_pipeline.handlers.base import ANSWER
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.evaluation import evaluate
from rollyard_sandbox.client import ExecClient
from rollyard_tasks.task_list import TaskListError, parse_lines
from rollyard_testing.invariants import deserves_nothing
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `code`")


SPEC = RolloutJobSpec.model_validate(
    {"tasks": {"stream": True}, "handler": "code", "agent": {"type": "oracle"}}
)
CHECK = """
def check(candidate):
    for i in range(5):
        assert candidate(i) == i * i + 17, "wrong"
"""
ASSERTED: dict[str, Any] = {"entry_point": "f", "cases": [{"program": CHECK}]}
PLAIN: dict[str, Any] = {"entry_point": "f", "cases": [{"program": "assert f(3) == 26\nassert f(4) == 33"}]}
PRINTED: dict[str, Any] = {"cases": [{"input": "3", "output": "26"}, {"input": "4", "output": "33"}]}
CALLED: dict[str, Any] = {
    "entry_point": "f",
    "cases": [{"input": str(i), "output": str(i * i + 17)} for i in (3, 4)],
}
MADE: dict[str, Any] = {
    "entry_point": "f",
    "setup": "given = [int('3'), int('4')]",
    "cases": [{"program": "assert f(given[0]) == 26\nassert f(given[1]) == 33"}],
}
CHECKED = {
    **PRINTED,
    "compare": "checker",
    "checker": "def check(input, output, expected): return output.strip() == expected",
}
CHECKER = {"compare": "checker", "checker": "def check(input, output, expected): return output == expected"}
RIGHT = "def f(i): return i * i + 17\nif __name__ == '__main__': print(f(int(input())))"

SEARCH = """
import gc, glob, sys
texts = [str(sys._getframe(i).f_globals) for i in (0, 1)]
names = glob.glob('/proc/*/cmdline') + glob.glob('/proc/*/environ') + glob.glob('/tmp/**', recursive=True)
for name in names:
    try:
        texts.append(open(name).read())
    except (OSError, ValueError):
        pass
texts += [str(o) for o in gc.get_objects() if isinstance(o, (dict, list))]
def f(i): return i ** 2 + 17 if any('i ' + '* i' in t for t in texts) else 0
print([w for t in texts for w in ('2' + '6', '3' + '3') if 'output": "' + w in t] or 0)
"""
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for p in filter(str.isdigit, os.listdir('/proc')):
                try:
                    if b'judge' not in open(f'/proc/{p}/cmdline', 'rb').read():
                        continue
                    for d in (1, 3, 4, 5):
                        open(f'/proc/{p}/fd/{d}', 'w').write('{"passed": true}')
                    os.kill(int(p), 9)
                except OSError:
                    pass
    os._exit(0)
def f(i): return 0
print(0)
"""
ANSWERS = {
    "exit_0_at_once": "import os; os._exit(0)",
    "sys_exit_0": "import sys; sys.exit(0)",
    "exit_0_in_the_call": "import os\ndef f(i): os._exit(0)",
    "plants_reward_files": "import os\nfor d in ('.', '..', '/work', '/tmp', os.environ['HOME']):\n"
    "    for n in ('reward', 'reward.txt', 'reward.json'):\n"
    "        try: open(f'{d}/{n}', 'w').write('1')\n        except OSError: pass\n"
    "def f(i): return 0\nprint(0)",
    "kills_itself": "import os\ndef f(i): os.kill(os.getpid(), 9)",
    "kills_its_runner": "import os\ndef f(i): os.kill(os.getppid(), 9)",
    "kills_everything": "import os\ndef f(i): os.kill(-1, 9)\nf(0)",
    "always_equal": "class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\n"
    "def f(i): return E(0)\nprint(E(0))",
    "always_equal_anything": "class E:\n    def __eq__(s, o): return True\n"
    "    def __getattr__(s, n): return s\n"
    "    def __call__(s, *a): return s\ndef f(i): return E()",
    "patched_builtins": "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
    "builtins.len = builtins.all = builtins.isinstance = lambda *a: True\ndef f(i): return 0",
    "raises_an_assertion": "def f(i): raise AssertionError",
    "forged_verdict": "import os\nfor d in range(1, 20):\n    try: os.write(d, b'{\"passed\": true}')\n"
    "    except OSError: pass\ndef f(i): return 0",
    "forged_results": "import os\ndef f(i):\n    for d in range(1, 20):\n"
    "        try: os.write(d, b'{\"v\": true}\\n' * 9)\n"
    "        except OSError: pass\n    os._exit(0)",
    "patched_modules": "import json, os, sys\njson.dumps = lambda *a, **k: '{\"passed\": true}'\n"
    "m = sys.modules['__main__']\nm.judge = m.encode = lambda *a: {'passed': True}\ndef f(i): return 0",
    "looks_for_the_tests": SEARCH,
    "daemon": DAEMON,
    "fills_the_disk": "def f(i):\n"
    "    for n in range(10**6): open(f'/work/{n}', 'w').write('x' * 10**6)\nf(0)",
    "prints_100_mb": "def f(i): return 'x' * 10**8\nprint('x' * 10**8)",
    "hangs": "def f(i):\n    while True: pass\nf(0)",
    "endless_result": "import itertools\ndef f(i): return itertools.count()",
    "deep_result": "def f(i):\n    r = []\n    for n in range(10**5): r = [r]\n    return r",
    "wrong": "def f(i): return 26\nif __name__ == '__main__': print(26)",
}  # fmt: skip
BOMBS = {
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork_bomb_in_the_call": "import os\ndef f(i):\n    while True:\n        try: os.fork()\n"
    "        except OSError: pass\nf(0)",
    "fork_bomb_of_sessions": "import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n"
    "    except OSError: pass",
    "thread_bomb": "import threading\ndef spin():\n    while True: pass\nwhile True:\n"
    "    try: threading.Thread(target=spin).start()\n    except RuntimeError: pass",
}  # fmt: skip
PLANTED = r"""
mkdir -p ~/bin ~/.local/lib/python3/site-packages /work/bin /tmp/bin; cd /work
for f in conftest.py sitecustomize.py usercustomize.py json.py ast.py random.py resource.py os.py; do
  echo 'import sys; sys.stdout.write("{\"passed\": true}"); sys.stdout.flush(); import os; os._exit(0)' > $f
  cp $f ~/ ; cp $f /tmp/; cp $f ~/.local/lib/python3/site-packages/
done
for f in python3 python bash sh; do
  printf '#!/bin/sh\necho "{\\"passed\\": true, \\"more\\": false, \\"calls\\": []}"\n' > bin/$f
  chmod +x bin/$f
  cp bin/$f ~/bin/; cp bin/$f /tmp/bin/
done
export PATH=/work/bin:$HOME/bin:/tmp/bin:$PATH PYTHONPATH=/work PYTHONSTARTUP=/work/json.py PYTHONHOME=/work
"""


@pytest.fixture
async def sandbox(
    bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[ExecClient, str]]:
    provider = open_provider("bubblewrap", run_dir=tmp_path_factory.mktemp("s"), node="n")
    await provider.start()
    found = await provider.acquire(SandboxRequest(), LeaseRef(rollout="r", token=1))
    try:
        yield found.client, found.workdir
    finally:
        await found.close()
        await provider.release(found.handle)
        await provider.aclose()


async def reward(
    sandbox: tuple[ExecClient, str], answer: str, tests: dict[str, Any], limit: float = 2.0
) -> float:
    task = Task.model_validate(
        {"id": "a", "prompt": "?", "tests": {**tests, "time_limit_seconds": patience(limit)}}
    )
    client, workdir = sandbox
    context = StageContext(task, SPEC, "r", 0, 30.0, client, workdir, carry={ANSWER: answer})
    return (await evaluate(CodeHandler(), context, 45.0)).reward


@pytest.mark.attack(
    "a program exits early, kills its runner, patches builtins, forges verdicts or results, leaves a "
    "daemon, looks for the tests, or returns objects that are equal to everything",
    stopped_by="the policy's processes get inputs only; verdicts come from the worker, or from processes "
    "that start after all of the policy's are killed and that load none of its code",
)
@pytest.mark.parametrize("name", ANSWERS)
async def test_no_program_decides_its_own_score(sandbox: tuple[ExecClient, str], name: str) -> None:
    limit = 0.5 if name == "hangs" else 2.0  # It takes the whole limit of each test.
    for tests in (ASSERTED, PLAIN, PRINTED, CALLED, CHECKED, MADE):
        deserves_nothing(await reward(sandbox, ANSWERS[name], tests, limit))


@pytest.mark.attack(
    "a program forks without end, in sessions of its own, too, starts threads, fills memory or disk, "
    "prints 100 MB or kills its parent, so that the evaluation fails and is tried again",
    stopped_by="limits of the sandbox; commands have the lowest priority in its control group, so that "
    "the exec server answers and ends the program in time: 0",
)
@pytest.mark.parametrize("name", BOMBS)
async def test_no_program_keeps_its_sandbox_from_answering(
    sandbox: tuple[ExecClient, str], name: str
) -> None:
    """The exec server ends each of them in time, and the next evaluation in the same sandbox is as usual."""
    for tests in (PRINTED, CALLED):
        deserves_nothing(await reward(sandbox, BOMBS[name], tests, 0.5))
        assert await reward(sandbox, RIGHT, tests) == 1.0


@pytest.mark.attack(
    "a function raises StopIteration, which ends an iterator of the test in silence",
    stopped_by="it is raised as RuntimeError, as in generators (PEP 479)",
)
@pytest.mark.parametrize(
    "program",
    [
        "assert all(map(candidate, [3, 4]))",
        "for given, wanted in zip(map(candidate, [3, 4]), [26, 33]): assert given == wanted",
        "for given in map(candidate, [3, 4]): assert given in (26, 33)",
        "assert not any(map(lambda i: candidate(i) != i * i + 17, [3, 4]))",
        "assert [given for given in map(candidate, [3, 4])] != [0, 0]",
    ],
)
async def test_no_exception_ends_an_iterator_of_the_test_in_silence(
    sandbox: tuple[ExecClient, str], program: str
) -> None:
    """An iterator that raises StopIteration has come to its end, and a loop over it is content."""
    tests = {"entry_point": "f", "cases": [{"program": program}]}
    for raised in ("StopIteration", "StopIteration(26)", "StopAsyncIteration", "GeneratorExit", "Quiet"):
        source = f"class Quiet(StopIteration): pass\ndef f(*given): raise {raised}"
        deserves_nothing(await reward(sandbox, source, tests))
    assert await reward(sandbox, RIGHT, tests) == 1.0


@pytest.mark.attack(
    "a wrong answer leads a test to end Python, which reads as a pass, or as a failure that buys a new try",
    stopped_by="a test that gives no verdict, or raises anything, has failed",
)
@pytest.mark.parametrize(
    "ends", ["sys.exit(0)", "raise KeyboardInterrupt", "os._exit(0)", "raise SystemExit", "exit()"]
)
async def test_a_test_that_ends_python_has_not_passed(sandbox: tuple[ExecClient, str], ends: str) -> None:
    program = f"import os, sys\nif candidate(3) != 26: {ends}\nassert candidate(4) == 33"
    tests = {"entry_point": "f", "cases": [{"program": program}]}
    for wrong in ("def f(i): return 0", "def f(i): return 26"):
        deserves_nothing(await reward(sandbox, wrong, tests))
    assert await reward(sandbox, RIGHT, tests) == 1.0


@pytest.mark.attack(
    "results lead a test past some of its calls",
    stopped_by="the calls to which the results lead are made, and a wrong result fails the test",
)
async def test_results_may_lead_past_a_call(sandbox: tuple[ExecClient, str]) -> None:
    """Which calls a test makes depends on the results, in tests that are right as well."""
    tests = {"entry_point": "f", "cases": [{"program": "assert not candidate(1) or candidate(2) == 4"}]}
    assert await reward(sandbox, "def f(i): return i * i if i > 1 else 0", tests) == 1.0
    assert await reward(sandbox, "def f(i): return i * i", tests) == 1.0
    deserves_nothing(await reward(sandbox, "def f(i): return i", tests))


@pytest.mark.attack(
    "what a test wrote when its calls were looked for is read by the program",
    stopped_by="each side has a private place of its own, and that of the other one is removed",
)
async def test_nothing_that_a_test_wrote_is_there_for_the_program(sandbox: tuple[ExecClient, str]) -> None:
    """The first pass of a test, which finds out its calls, may write files with its answers."""
    wrote = """
import os, tempfile
for name in ("key", os.path.join(os.environ["HOME"], "key"), os.path.join(tempfile.gettempdir(), "key")):
    open(name, "w").write(str([3 * 3 + 17, 4 * 4 + 17]))
numbers = [3, 4]
for i in numbers:
    assert candidate(i) == i * i + 17
"""
    searches = """
import glob, os
def f(i):
    for root in {os.getcwd(), os.environ["HOME"], os.environ["TMPDIR"]}:
        for name in glob.glob(os.path.join(os.path.dirname(root), "**", "key"), recursive=True):
            return eval(open(name).read())[i - 3]
"""
    tests = {"entry_point": "f", "cases": [{"program": wrote}, {"program": wrote}]}
    deserves_nothing(await reward(sandbox, searches, tests))
    assert await reward(sandbox, RIGHT, tests) == 1.0


@pytest.mark.attack(
    "the arguments of a test are objects, so that calls are made from its text, which also says what is "
    "expected",
    stopped_by="the policy's process gets the expressions of the calls only",
)
async def test_calls_with_objects_show_no_result(sandbox: tuple[ExecClient, str]) -> None:
    """The policy's process gets the expressions of the calls, and nothing else of the test."""
    searches = """
import gc, re, sys
def f(i):
    texts, frame = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))], sys._getframe()
    while frame:
        texts += [repr(frame.f_globals), repr(frame.f_locals)]
        frame = frame.f_back
    found = re.findall("4159[0-9]{6}", " ".join(texts))
    return int(found[0]) if found else 0
"""
    tests = {
        "entry_point": "f",
        "setup": "made = [3]",
        "cases": [{"program": "assert f(made) == 4159265358"}],
    }
    deserves_nothing(await reward(sandbox, searches, tests))
    assert await reward(sandbox, "def f(i): return 4159265358", tests) == 1.0
    # The search would have found it, had it been there.
    leaks = {**tests, "setup": "made = [3, 4159265358]"}
    assert await reward(sandbox, searches, leaks) == 1.0


@pytest.mark.attack(
    "a forged result, such as one that nests deep, keeps the worker from a verdict",
    stopped_by="what cannot be read or compared has failed: 0",
)
@pytest.mark.parametrize(
    "said",
    [
        '{"v": ' + "[" * 2500 + "]" * 2500 + "}", '{"v": {"x": []}}', '{"v": {"x": ["Decimal", "no"]}}',
        '{"v": {"x": ["Fraction", {"l": [{"i": "1a"}, {"i": "0"}]}]}}',
        '{"v": {"x": ["defaultdict", {"l": []}]}}',
        '{"v": {"x": ["os", "system"]}}', '{"v": {"o": "object"}}', '{"v": {"x": {"o": 1}}}',
    ],
)  # fmt: skip
async def test_no_result_that_is_forged_keeps_the_worker_from_a_verdict(
    sandbox: tuple[ExecClient, str], said: str
) -> None:
    """Versions of Python differ in how deep a value may be that JSON and marshal take."""
    forges = f"""
import os, sys
frame = sys._getframe()
while "out" not in frame.f_locals:
    frame = frame.f_back
os.write(frame.f_locals["out"], {said.encode()!r})
os._exit(0)
"""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(6000)
    try:
        for program in (
            "assert f(3) == 26",
            "given = [f(3)]\nassert given == [26]",
            "given = [f(3)]\nassert given",
        ):
            tests = {"entry_point": "f", "cases": [{"program": program}]}
            deserves_nothing(await reward(sandbox, forges, tests))
        for tests in (
            {**CALLED, "cases": CALLED["cases"][:1]},
            {**CALLED, **CHECKER, "cases": CALLED["cases"][:1]},
        ):
            deserves_nothing(await reward(sandbox, forges, tests))
    finally:
        sys.setrecursionlimit(usual)


@pytest.mark.attack(
    "modules, start-up files and programs such as `python3` are planted during Run",
    stopped_by="Eval's environment and folders, into which Run could not write",
)
async def test_planted_programs_and_modules_are_not_used(sandbox: tuple[ExecClient, str]) -> None:
    planted = await sandbox[0].bash(PLANTED)
    assert planted.exit_code == 0, planted.text()
    for tests in (ASSERTED, PLAIN, PRINTED, CALLED, CHECKED):
        deserves_nothing(await reward(sandbox, "def f(i): return 0\nprint(0)", tests))
        assert await reward(sandbox, RIGHT, tests) == 1.0


class Planted:
    """A pickled object that runs a program when it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("/tmp/rollyard-pickle-was-loaded"),)  # type: ignore[return-value]


def packed(pickled: bytes) -> str:
    return base64.b64encode(zlib.compress(pickled)).decode()


PICKLES = pytest.mark.attack(
    "a row of LiveCodeBench holds a pickle that runs a program or takes gigabytes",
    boundary="control plane",
    surface="task files",
    stopped_by="its instructions are listed and not carried out; only those of one text are taken, within "
    "a bound",
)


@PICKLES
@pytest.mark.parametrize(
    ("private", "problem"),
    [
        (packed(pickle.dumps(Planted())), "holds something other than a text"),
        (packed(pickle.dumps([{"input": "1", "output": "1"}])), "holds something other than a text"),
        (packed(b"\x80\x04r\xff\xff\xff\x7f."), "holds something other than a text"),
        (packed(b"cos\nsystem\n(S'true'\ntR."), "holds something other than a text"),
        (packed(pickle.dumps("x" * (50 << 20))), "longer than"),
        (packed(b"\x80\x04X\xff\xff\xff\xff."), "not a pickle"),
        ("@@@", "not compressed data"), (base64.b64encode(b"x").decode(), "is damaged"),
    ],
)  # fmt: skip
def test_a_pickle_in_a_row_is_never_loaded(private: str, problem: str) -> None:
    row = {"question_content": "?", "public_test_cases": "[]", "private_test_cases": private}
    with pytest.raises(TaskListError, match=f"line 1: private_test_cases: .*{problem}"):
        parse_lines([json.dumps(row)], TaskSource(url="x", format="livecodebench"))
    assert not Path("/tmp/rollyard-pickle-was-loaded").exists()


@PICKLES
def test_the_pickled_text_of_a_row_is_read() -> None:
    cases = json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        row = {
            "question_content": "?", "public_test_cases": "[]", "question_id": "abc_1",
            "private_test_cases": packed(pickle.dumps(cases, protocol)),
        }  # fmt: skip
        (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format="livecodebench"))
        assert task.id == "livecodebench/abc_5f_1"
        assert task.tests is not None
        assert (task.tests.cases[0].input, task.tests.cases[0].output) == ("1", "2")
