"""The handler `mixed`: each task of a job has the sandboxes, the stages and the score of its own handler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.task import Task
from rollyard_pipeline.errors import SetupFailed, TaskInvalid
from rollyard_pipeline.handlers import Handler
from rollyard_pipeline.handlers.code.handler import CodeHandler
from rollyard_pipeline.handlers.harbor.handler import HarborHandler
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.handlers.mixed import MixedHandler
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.handlers.stem import StemHandler
from rollyard_pipeline.handlers.swe.handler import SweHandler
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack, read_folder
from rollyard_testing.pipeline import swelab
from rollyard_testing.pipeline.stagelab import StageLab, stage_lab
from rollyard_testing.pipeline.swelab import FIXING, swe_task

HARBOR = Path(__file__).parents[2] / "examples/harbor/tasks"
LARGER = swelab.SMALL
"""A sandbox with room for the repository."""


@pytest.fixture
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StageLab]:
    async with stage_lab("process", tmp_path_factory.mktemp("s")) as found:
        yield found


def answered(said: str, **fields: Any) -> Task:
    """Return a task whose reference solution hands in this answer."""
    call = {"name": "submit", "arguments": {"answer": said}}
    return Task.model_validate({"id": "t", "prompt": "?", "solution": [call], **fields})


KINDS: dict[str, tuple[dict[str, Any], str, str, bool]] = {
    "code": (
        {"tests": {"entry_point": "add", "cases": [{"program": "assert add(1, 2) == 3"}]}},
        "def add(a, b): return a + b", "def add(a, b): return a", False,
    ),
    "shell": ({"test_script": '[ "$ROLLYARD_ANSWER" = yes ]'}, "yes", "no", True),
    "stem": ({"choices": ["one", "two"], "answer": "B"}, "B", "A", False),
    "math": ({"answer": "1/2"}, "0.5", "2", False),
}  # fmt: skip
"""For each handler the fields of a task, a right and a wrong answer, and whether Run has a sandbox."""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_has_the_score_and_the_sandbox_of_its_kind(lab: StageLab, kind: str) -> None:
    fields, right, wrong, sandboxed = KINDS[kind]
    agent = {"type": "oracle", "tools": ["submit"]}
    for said, reward in ((right, 1.0), (wrong, 0.0)):
        result = await lab.play(answered(said, **fields), handler="mixed", agent=agent)
        assert (result.reward, result.reward_reason) == (reward, "")
        # The tool `submit` needs no sandbox, so only the handler can have asked for one.
        assert (result.sandbox is not None) == sandboxed


async def test_a_repository_is_evaluated_in_a_fresh_sandbox(lab: StageLab) -> None:
    solved = await lab.play(swe_task([FIXING]), handler="mixed", sandbox=LARGER)
    assert (solved.reward, solved.reward_components) == (1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0})
    # What Run left beside the repository is not in the fresh sandbox, but the repository's own change is.
    script = "[ -e kept ] && [ ! -e ../beside ] && echo 'PASSED a::b'"
    fields = {"verdict": "log", "script": script, "fail_to_pass": ["a::b"], "pass_to_pass": []}
    for command, reward in (("touch beside repo/kept", 1.0), ("true", 0.0)):
        task = swe_task([command], **fields)
        assert (await lab.play(task, handler="mixed", sandbox=LARGER)).reward == reward


async def test_a_repository_has_the_errors_of_its_handler(lab: StageLab) -> None:
    with pytest.raises(SetupFailed, match=r"swe.repository.path: the command ended with 1"):
        await lab.play(swe_task([], repository={"path": "nowhere"}), handler="mixed", sandbox=LARGER)
    stages = {"eval": {"sandbox": "shared"}}
    with pytest.raises(TaskInvalid, match=r"stages\.eval: the handler 'swe' needs a fresh sandbox"):
        await lab.play(swe_task([FIXING]), handler="mixed", sandbox=LARGER, stages=stages)


async def test_a_folder_of_harbor_has_its_steps_and_its_verifier(
    bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with stage_lab("bubblewrap", tmp_path_factory.mktemp("h")) as lab:
        for name in ("separate", "steps"):
            row = {"path": name, "task_binary": pack(read_folder(HARBOR / name))}
            task = Task.model_validate(HarborFormat().task(Row(row, 1)))
            assert (await lab.play(task, handler="mixed")).reward == 1.0, lab.observed
            assert (await lab.play(task, [[]], handler="mixed")).reward == 0.0


def test_what_a_task_brings_first_decides_its_kind() -> None:
    """In this order: what a kind brings beside it, such as an answer, is no task of another kind."""
    row = {"path": "single", "task_binary": pack(read_folder(HARBOR / "single"))}
    harbor = Task.model_validate(HarborFormat().task(Row(row, 1))).harbor
    parts: list[tuple[type[Handler], dict[str, Any]]] = [
        (HarborHandler, {"harbor": harbor}), (SweHandler, {"swe": swe_task([]).swe}),
        (CodeHandler, {"tests": answered("", **KINDS["code"][0]).tests}),
        (ShellHandler, {"test_script": "true"}),
        (StemHandler, {"choices": ["one", "two"]}), (MathHandler, {"answer": "B"}),
    ]  # fmt: skip
    handler, task = MixedHandler(), Task(id="a", prompt="?")
    for kind, fields in reversed(parts):
        task = task.model_copy(update=fields)
        assert type(handler.for_task(task)) is kind
    assert type(handler.for_task(answered("1", numeric={"unit": "m"}))) is StemHandler
    assert {*handler.components} == {"tests_passed", "exit_zero", "answered", "verify_timeout"}


def test_what_a_task_brings_is_checked_by_its_handler() -> None:
    handler = MixedHandler()
    assert handler.check(swe_task([])) == []
    assert handler.check(Task(id="a", prompt="?")) == ["answer: required by the handler 'math'"]
    tests = {"entry_point": "add", "setup": "x = g()", "cases": [{"program": "assert all(map(add, x))"}]}
    assert handler.check(answered("", tests=tests)) == [
        "tests.cases[0].program: with 'setup', it must call add in plain assertions only"
    ]
