"""Programs that use up or break their sandbox, as rollouts of a whole job: none of them gets a new try."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.manifests import job_manifest

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handler `code`")


BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
PROGRAMS = {
    "hangs": "while True: pass",
    "fork-bomb": BOMB,
    "fork-bomb-that-ends": "import os\nwhile True: os.fork()",
    "fork-bomb-of-sessions": BOMB.replace("os.fork()", "os.fork() or os.setsid()"),
    "fills-the-disk": "for n in range(10**6): open(f'/work/{n}', 'w').write('x' * 10**6)",
    "fills-the-memory": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "fills-shared-memory": "import mmap\nheld = []\nfor n in range(64):\n"
    "    held.append(mmap.mmap(-1, 1 << 24))\n    held[-1].write(b'x' * (1 << 24))\nprint(int(input()) + 1)",
    "prints-100-mb": "print('x' * 10**8)",
    "kills-its-parent": "import os\nos.kill(os.getppid(), 9)",
    "kills-everything": "import os\nos.kill(-1, 9)",
    "right": "print(int(input()) + 1)",
}


FILLING = """
def f(i):
    for n in range(10**6):
        try: open(f'/work/{n}', 'w').write('x' * 10**6)
        except OSError: return 0
"""
FUNCTIONS = {
    "fills-the-disk": FILLING,
    "locks-the-folders": "import os\ndef f(i):\n    for d in ('/work', '/tmp', '/dev/shm'): os.chmod(d, 0)",
    "kills-everything": "import os\ndef f(i): os.kill(-1, 9)",
    "fills-the-memory": "held = []\ndef f(i):\n    while True: held.append(bytearray(1 << 20))",
    "ends-the-iterator": "def f(i): raise StopIteration",
    "right": "def f(i): return i + 1",
}
"""Programs that break the sandbox between the policy's processes and those of the test."""


def played(
    lab: Lab, name: str, programs: dict[str, str], tests: dict[str, Any], *tools: str, **stage: Any
) -> Any:
    """Return the trajectories of a job whose policy answers with these programs, and has further tools."""
    tasks: list[dict[str, Any]] = [
        {
            "id": name, "prompt": "?", "tests": tests,
            "solution": [{"name": "submit", "arguments": {"answer": program}}],
        }
        for name, program in programs.items()
    ]  # fmt: skip
    manifest = job_manifest(
        name,
        {
            "tasks": {"inline": tasks},
            "handler": "code",
            "minGroupSize": 1,
            "agent": {"type": "oracle", "tools": ["submit", *tools]},
            "sandbox": {"resources": {"memory": "512Mi", "disk": "16Mi", "processes": 256}, "warm": 0},
            "stages": {"eval": stage},
        },
    )
    lab.client.submit(manifest)
    found = list(lab.client.trajectories(name, follow=True))
    assert {each.task_id: (each.reward, len(each.attempts)) for each in found} == {
        name: (float(name == "right"), 0) for name in programs
    }
    return found


@pytest.mark.attack(
    "a program forks without end, in sessions of its own, too, starts threads, fills memory or disk, "
    "prints 100 MB or kills its parent, so that the evaluation fails and is tried again",
    stopped_by="limits of the sandbox; commands have the lowest priority in its control group, so that "
    "the exec server answers and ends the program in time: 0",
)
def test_a_program_gets_one_evaluation(bubblewrap_lab: Lab) -> None:
    tests = {"cases": [{"input": "1", "output": "2"}], "time_limit_seconds": 2}
    found = played(bubblewrap_lab, "code-rollouts", PROGRAMS, tests, "bash")
    timed_out = {each.task_id for each in found if each.reward_reason == "TestTimeout"}
    assert {"hangs", "fork-bomb"} <= timed_out


@pytest.mark.attack(
    "a program fills the disk, locks the folders or uses up the memory of a fresh sandbox of Eval, so "
    "that the evaluation fails and is tried again",
    stopped_by="what an answer does there is the policy's doing, too: 0",
)
@pytest.mark.parametrize("where", ["shared", "fresh", "alone"])
def test_a_program_that_breaks_the_sandbox_gets_one_evaluation(bubblewrap_lab: Lab, where: str) -> None:
    """A fresh sandbox holds nothing of Run's, but the answer is the policy's there, too.

    It is the rollout's only one if no tool needs one.
    """
    program = "import math, sys\nfor i, got in enumerate(map(f, range(2))):\n"
    program += "    if got != i + math.ceil(0.5): sys.exit(0)"
    tests = {"entry_point": "f", "cases": [{"program": program}], "time_limit_seconds": 3}
    of_run = () if where == "alone" else ("bash",)
    sandbox = "fresh" if where == "alone" else where
    found = played(bubblewrap_lab, f"code-{where}", FUNCTIONS, tests, *of_run, sandbox=sandbox)
    assert "SandboxSabotaged" in {each.reward_reason for each in found}
