"""Programs of kept answers that `rollyard rescore` runs again, and that want more than their score."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import RolloutJobSpec, Task, Trajectory
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.stages.rescoring import Rescorer

pytestmark = pytest.mark.attack(boundary="control plane", surface="`rollyard rescore`")


SPEC = {
    "tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"},
    "sandbox": {"warm": 0, "resources": {"memory": "256Mi", "disk": "16Mi", "processes": 64}},
}  # fmt: skip
LEAVES = "import os\nfor d in ('/work', '/tmp', '/dev/shm'): open(f'{d}/left', 'w').write('x')\nprint(2)"
LOOKS = "import os\nprint(sum(os.path.exists(f'{d}/left') for d in ('/work', '/tmp', '/dev/shm')) + 1)"
PROGRAMS = {
    "right": ("print(int(input()) + 1)", 1.0),
    "exits": ("import os; os._exit(0)", 0.0),
    "kills": ("import os; os.kill(-1, 9)", 0.0),
    "fills-the-disk": ("for n in range(10**6): open(f'/work/{n}', 'w').write('x' * 10**6)", 0.0),
    "fills-the-memory": ("held = []\nwhile True: held.append(bytearray(1 << 20))", 0.0),
    "leaves-something": (LEAVES, 0.0),
    "looks-for-it": (LOOKS, 0.0),
}


def kept(name: str, program: str) -> Trajectory:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": program}]
    record = {"id": name, "job": "j", "task_id": name, "group_id": "g", "sample_index": 0, "reward": 1.0}
    return Trajectory.model_validate({**record, "messages": messages})


def task(name: str, **fields: Any) -> Task:
    case = {"input": "2", "output": "3"}
    tests = {"cases": [case], "time_limit_seconds": 3}
    return Task.model_validate({"id": name, "prompt": "?", "answer": "1", "tests": tests, **fields})


def call(name: str = "submit", error: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "error": error}


@pytest.mark.attack(
    "malformed or later calls of `submit` replace the answer that was scored",
    stopped_by="the last call that the tool accepted decides",
)
@pytest.mark.parametrize(
    ("turns", "answer"),
    [
        ([], None),
        ([[]], None),
        ([[call(answer="a"), call(answer="b")], [call("bash", answer="c")], []], "b"),
        ([[call(answer="a")], [call(answer="b")]], "b"),
        ([[call(answer="a")], [call(answer="b", error="not run")]], "a"),
        ([[call(answer="a")], [call(answer=1), call(text="b")]], "a"),
        ([[call(answer="a", error="not run")]], None),
        ([[call(answer="")]], ""),
    ],
)
def test_the_last_answer_that_was_taken_is_the_one_that_was_submitted(
    turns: list[list[dict[str, Any]]], answer: str | None
) -> None:
    made = [
        {"segment": 0, "start": 0, "end": 0, "finish_reason": "stop", "tool_calls": calls} for calls in turns
    ]
    record = kept("x", "no program").model_dump()
    assert Trajectory.model_validate({**record, "turns": made}).answer == answer


@pytest.fixture
async def rescorer(bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("r")
    provider = partial(open_provider, "bubblewrap", run_dir=folder, node="n")
    made = []

    async def make(handler: str) -> Rescorer:
        made.append(Rescorer(handler, RolloutJobSpec.model_validate(SPEC), None, "me", provider=provider))
        await made[-1].check()
        return made[-1]

    yield make
    for one in made:
        await one.close()
    assert list((folder / "sandboxes").glob("[!.]*")) == [], "a sandbox is left"


KEPT_ANSWERS = pytest.mark.attack(
    "a program in a kept answer reaches the admin's network, files or token, breaks its sandbox to escape "
    "its score, or meets another one's files",
    stopped_by="a sandbox for each trajectory, without a network, as Eval's own ones",
)


@KEPT_ANSWERS
async def test_each_program_is_scored_in_a_sandbox_of_its_own(rescorer: Any) -> None:
    pairs = [(kept(name, program), task(name)) for name, (program, _) in PROGRAMS.items()]
    found = await (await rescorer("code")).rescored(pairs, datetime.now(UTC))
    seen = {one.id: (one.status, one.reward, one.message) for one in found}
    assert seen == {name: ("succeeded", reward, "") for name, (_, reward) in PROGRAMS.items()}


@KEPT_ANSWERS
async def test_it_reaches_nothing_of_the_machine(
    rescorer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLYARD_TOKEN", "the-admins-token")
    (tmp_path / "secret").write_text("the-admins-file")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import glob, os, socket\ntried = []\n"
            f"try:\n    socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)\n"
            "    tried.append('network')\nexcept OSError: pass\n"
            f"try:\n    tried.append(open({str(tmp_path / 'secret')!r}).read())\nexcept OSError: pass\n"
            "for name in glob.glob('/proc/*/environ'):\n"
            "    try: tried += ['token'] * (b'the-admins-token' in open(name, 'rb').read())\n"
            "    except OSError: pass\nprint(tried or 3)"
        )
        (one,) = await (await rescorer("code")).rescored([(kept("a", program), task("a"))], datetime.now(UTC))
    assert (one.status, one.reward) == ("succeeded", 1.0), "it has reached something"


@pytest.mark.attack(
    "a task whose reward depends on files of Run is scored without them",
    stopped_by="such a trajectory is `failed` (`RescoreRefused`), and has no reward",
)
async def test_what_run_left_is_not_made_up(rescorer: Any) -> None:
    """Tasks that are judged by files of Run's sandbox fail, beside others that are evaluated."""
    script = {"id": "b", "prompt": "?", "test_script": "exit 0"}
    pairs = [
        (kept("a", PROGRAMS["right"][0]), task("a")),
        (kept("b", "done"), Task.model_validate(script)),
        (kept("c", "The answer is 1"), task("c", tests=None)),
    ]
    found = await (await rescorer("mixed")).rescored(pairs, datetime.now(UTC))
    assert [(one.status, one.reward, one.reason) for one in found] == [
        ("succeeded", 1.0, ""), ("failed", None, "RescoreRefused"), ("succeeded", 1.0, ""),
    ]  # fmt: skip
