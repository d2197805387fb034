"""What an evaluation printed is shown to people, and a policy's program may have written it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rollyard import terminal
from rollyard.render.trajectory import TrajectoryView
from rollyard_crds.lease import StageResult
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_crds.trajectory import MAX_REWARD_OUTPUT, Trajectory
from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.code.handler import shown_calls
from rollyard_testing.page.attacks import TEXTS

pytestmark = pytest.mark.attack(boundary="evaluation", surface="`reward_output`")


HUGE = "x" * (10 << 20)


def context() -> StageContext:
    """Return the context of an evaluation."""
    spec = RolloutJobSpec.model_validate(
        {
            "backendRef": {"name": "pool"},
            "tasks": {"inline": [{"id": "t", "prompt": "p"}]},
            "handler": "shell",
        }
    )
    return StageContext(task=Task(id="t", prompt="p"), spec=spec, rollout="r", sample_index=0, timeout=60.0)


PRINTED = pytest.mark.attack(
    "a program of the policy prints ten megabytes, NUL, half characters or control characters, to lose "
    "its result, to command a terminal, or to look like a line of ours",
    stopped_by="cleaned, and cut to its last 4,096 characters; it decides nothing; `rollyard view` marks "
    "each line of it",
)


@PRINTED
@pytest.mark.parametrize("text", [*TEXTS.values(), HUGE, "\0" * 5000, "\ud800\udc00\ud800" * 3000])
def test_no_output_is_too_long_or_too_odd_for_a_result(text: str) -> None:
    """Neither does it cost the rollout its reward, which would buy a policy further tries."""
    shown = context()
    for _ in range(3):
        shown.show(text)
    result = StageResult(rollout="r", token=1, stage="eval", reward=0.0, reward_output=shown.shown)
    assert len(result.reward_output) <= MAX_REWARD_OUTPUT
    assert "\0" not in result.reward_output
    assert json.loads(result.model_dump_json())["reward_output"] == result.reward_output


@PRINTED
def test_the_end_of_an_output_is_kept() -> None:
    shown = context()
    shown.show(HUGE)
    shown.show("the last line")
    shown.show("")
    assert shown.shown.endswith("x\nthe last line")


@PRINTED
@pytest.mark.parametrize("kind", list(TEXTS))
def test_a_terminal_obeys_no_output(kind: str) -> None:
    """Neither can a line of it be taken for one of the view's own."""
    shown = context()
    shown.show(TEXTS[kind])
    document: dict[str, Any] = {
        "id": "r", "job": "j", "task_id": "t", "group_id": "t", "sample_index": 0, "reward": 0.0,
        "reward_output": shown.shown,
    }  # fmt: skip
    out = io.StringIO()
    view = TrajectoryView(terminal.console(file=out, width=200, color_system=None))
    view.show(Trajectory.model_validate(document))
    printed = out.getvalue()
    assert not {character for character in printed if character in "\x1b\x07\x08\r\x9b"}
    _, heading, rest = printed.partition("the evaluation printed:\n")
    assert heading
    lines = len(shown.shown.splitlines())
    assert all(line.startswith("  │ ") for line in rest.splitlines()[:lines])


def deep(levels: int) -> Any:
    """Return a list in a list, and so on, as a policy's process may report it."""
    value: Any = []
    for _ in range(levels):
        value = {"l": [value, value]}
    return value


@pytest.mark.attack(
    "what the function of the policy returned is endless, nested without end, or hashes slowly, to hold "
    "up the worker that shows it",
    stopped_by="the first parts of it are shown as text; no value is made of it",
)
@pytest.mark.parametrize(
    "value",
    [
        deep(500), {"l": [{"i": "f" * 1000}] * 100_000}, {"i": "f" * 5_000_000}, {"i": "no number"}, {"i": 7},
        {"f": "nan" * 9999}, {"f": []}, {"d": [1, [2], [{}, {}]]}, {"d": "x"}, {}, {"o": "x" * 9999},
        {"o": {}}, {"s": [{"l": []}]}, {"b": "zz"}, {"": ""}, 10**400, 1.5, None, [[[]]], "\x1b[2J" * 9999,
        "\ud800",
    ],
)  # fmt: skip
def test_a_value_that_a_program_reports_is_shown_in_few_words(value: Any) -> None:
    """It is no value of Python's here: nothing is hashed or compared, and no address in memory is shown."""
    words = shown_calls([{"v": value}, {"e": value}, {}] * 1000)
    assert len(words.splitlines()) == 8
    assert len(words) < 8 * 260
    assert " at 0x" not in words
