"""`rollyard.evaluate`, and the plugins of commands that evaluate on this machine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import rollyard
from rollyard.errors import InvalidInput, LookupFailed
from rollyard.main import main
from rollyard_crds.reading.plugin import offers_of
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext
from rollyard_pipeline.rewards import RewardFunction
from rollyard_testing.checkout import ROOT

FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
PLUGIN = '''
from rollyard_pipeline.handlers import Evaluation, Handler
from rollyard_pipeline.rewards import reward_function

class CloseHandler(Handler):
    """Half a point for a text that begins like the answer."""

    needs_sandbox = False

    def check(self, task):
        return [] if task.answer else ["answer: required by the handler 'close'"]

    async def eval(self, ctx):
        return Evaluation(0.5 if ctx.final_text.startswith(ctx.task.answer) else 0.0)

@reward_function
def brevity(episode):
    return 1.0
'''


class Judge(Handler):
    needs_sandbox = False

    def check(self, task: Any) -> list[str]:
        return [] if task.answer else ["answer: required"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        ctx.show("what it saw")
        return Evaluation(1 / len(ctx.final_text), {"length": float(len(ctx.final_text))}, "Because")


class Length(RewardFunction):
    components = ("characters",)

    def score(self, episode: Mapping[str, Any]) -> Evaluation:
        length = float(len(episode["final_text"]))
        return Evaluation(length, {"characters": length})


def test_answers_are_evaluated_by_name_class_and_function(tmp_path: Path) -> None:
    tasks = [{"answer": "5"}, {"id": "other", "prompt": "3 + 4?", "answer": "7"}]
    right, wrong = rollyard.evaluate("math", tasks, ["It is 5.", "8"])
    assert (right.reward, right.components, right.error) == (1.0, {"answered": 1.0}, "")
    assert (wrong.reward, "expected: 7" in wrong.output) == (0.0, True)

    judged, failed = rollyard.evaluate(Judge, tasks, ["abcd", ""])
    assert (judged.reward, judged.components) == (0.25, {"length": 4.0})
    assert (judged.reason, judged.output) == ("Because", "what it saw")
    assert failed.reward is None
    assert failed.error.startswith("ZeroDivisionError: ")
    assert "(test_evaluate.py, line " in failed.error
    assert failed.error.endswith(", in eval)")

    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "a", "prompt": "?", "metadata": {"most": 3}}))

    def short(episode: Mapping[str, Any]) -> float:
        return float(len(episode["final_text"]) <= episode["task"]["metadata"]["most"])

    assert [one.reward for one in rollyard.evaluate(short, file, ["abcd"])] == [0.0]
    (scored,) = rollyard.evaluate(Length, [{}], ["abc"])
    assert (scored.reward, scored.components) == (3.0, {"characters": 3.0})

    def careless(episode: Mapping[str, Any]) -> float:
        return float(episode["task"]["truth"])

    (raised,) = rollyard.evaluate(careless, [{}], ["abc"])
    assert raised.error.startswith("KeyError: 'truth' (test_evaluate.py, line ")
    assert raised.error.endswith(", in careless)")
    (nothing,) = rollyard.evaluate(lambda episode: None, [{}], ["abc"])
    assert (nothing.reward, "reward is None, expected a finite number" in nothing.error) == (None, True)


async def test_it_works_where_an_event_loop_runs() -> None:
    assert asyncio.get_running_loop().is_running()
    assert [one.reward for one in rollyard.evaluate(Judge, [{"answer": "5"}], ["ab"])] == [0.5]


@pytest.mark.parametrize(
    ("handler", "tasks", "answers", "words"),
    [
        ("shell", [{"test_script": "true"}], ["a"], "handler 'shell' judges what Run left in its sandbox"),
        ("nobodys", [{}], ["a"], "no handler 'nobodys' is installed"),
        (Judge, [{}], ["a"], r"tasks\[0\] \('task-0'\): answer: required"),
        (Judge, [{"answr": "5"}], ["a"], r"tasks\[0\]: task\.answr: unknown field"),
        (Judge, [{"answer": "5"}], ["a", "b"], "answers: must be a list with a text for each of the 1 tasks"),
        (Judge, [{"answer": "5"}], "a", "got a text"),
        (Judge, [{"answer": "5"}], [7], r"answers\[0\]: "),
        (7, [{}], ["a"], "handler: must be the name of a handler, a class that derives from Handler, or"),
    ],
)
def test_what_cannot_be_evaluated_is_named(handler: Any, tasks: Any, answers: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        rollyard.evaluate(handler, tasks, answers)


def test_the_page_s_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = dict(FILE.findall((ROOT / "docs/rewards.md").read_text()))
    assert files.keys() == {"my_rewards.py", "try_it.py"}
    assert offers_of(files["my_rewards.py"].encode()) == {"reward_functions": {"brevity": "brevity"}}
    (tmp_path / "my_rewards.py").write_text(files["my_rewards.py"])
    monkeypatch.syspath_prepend(tmp_path)
    exec(files["try_it.py"], {})
    assert capsys.readouterr().out == "1.0 \n0.0 \n"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(LookupFailed, match="nowhere"):
        rollyard.evaluate(Judge, "nowhere.jsonl", [])


def test_commands_take_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PLUGIN)
    with_it = ["--plugin", "mine.py"]
    assert main(["grade", "--handler", "close", "--key", "5", "5 it is", *with_it]) == 0
    assert "reward 0.5" in capsys.readouterr().out
    assert main(["grade", "--handler", "close", "--key", "5", "5 it is"]) == 1
    assert "no handler 'close' is installed" in capsys.readouterr().err
    assert main(["grade", "--handler", "brevity", "--key", "5", "5 it is", *with_it]) == 1
    said = capsys.readouterr().err
    assert "'brevity' is a reward function, which a job names in spec.reward.function" in said
    assert "worker" not in said

    Path("tasks.jsonl").write_text('{"id": "a", "prompt": "?"}\n')
    assert main(["validate", "-f", "tasks.jsonl", "--handler", "close", *with_it]) == 1
    assert "task 'a': answer: required by the handler 'close'" in capsys.readouterr().err
    job = {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "j"},
        "spec": {
            "tasks": {"stream": True},
            "handler": "close",
            "reward": {"function": {"name": "brevity"}, "weights": {"function": 1.0}},
            "agent": {"type": "oracle"},
        },
    }
    Path("job.json").write_text(json.dumps(job))
    assert main(["validate", "-f", "job.json", *with_it]) == 0
    assert main(["validate", "-f", "job.json"]) == 1
    said = capsys.readouterr().err
    assert "spec.handler: no handler 'close' is installed" in said
    assert "no reward-function 'brevity' is installed; installed: none; what a file of yours" in said

    Path("mine.py").write_text(PLUGIN.replace("CloseHandler", "MathHandler"))
    assert main(["validate", "-f", "job.json", *with_it]) == 1
    assert "--plugin mine.py: MathHandler has the name 'math'" in capsys.readouterr().err
