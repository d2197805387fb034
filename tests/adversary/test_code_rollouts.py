"""Programs that use up or break their sandbox, as rollouts of a whole job: none of them gets a new try."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_testing.adversary.attacklab import Lab

pytestmark = pytest.mark.real

BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
PROGRAMS = {
    "hangs": "while True: pass",
    "fork-bomb": BOMB,
    "fork-bomb-that-ends": "import os\nwhile True: os.fork()",
    "fork-bomb-of-sessions": BOMB.replace("os.fork()", "os.fork() or os.setsid()"),
    "fills-the-disk": "for n in range(10**6): open(f'/work/{n}', 'w').write('x' * 10**6)",
    "fills-the-memory": "held = []\nwhile True: held.append(bytearray(1 << 20))",
    "prints-100-mb": "print('x' * 10**8)",
    "kills-its-parent": "import os\nos.kill(os.getppid(), 9)",
    "kills-everything": "import os\nos.kill(-1, 9)",
    "right": "print(int(input()) + 1)",
}


def test_a_program_gets_one_evaluation(bubblewrap_lab: Lab) -> None:
    tests = {"cases": [{"input": "1", "output": "2"}], "time_limit_seconds": 2}
    tasks: list[dict[str, Any]] = [
        {
            "id": name, "prompt": "?", "tests": tests,
            "solution": [{"name": "submit", "arguments": {"answer": program}}],
        }
        for name, program in PROGRAMS.items()
    ]  # fmt: skip
    manifest = {
        "apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "code-rollouts"},
        "spec": {
            "tasks": {"inline": tasks}, "handler": "code", "minGroupSize": 1,
            "agent": {"type": "oracle", "tools": ["submit"]},
            "sandbox": {"resources": {"memory": "512Mi", "disk": "16Mi", "processes": 256}, "warm": 0},
        },
    }  # fmt: skip
    bubblewrap_lab.client.submit(manifest)
    found = list(bubblewrap_lab.client.trajectories("code-rollouts", follow=True))
    assert {each.task_id: (each.reward, len(each.attempts)) for each in found} == {
        name: (float(name == "right"), 0) for name in PROGRAMS
    }
    timed_out = {each.task_id for each in found if each.reward_reason == "TestTimeout"}
    assert {"hangs", "fork-bomb"} <= timed_out
