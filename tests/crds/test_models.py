"""What the models of tasks, trajectories and updates refuse beside the bounds of their single fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from rollyard_crds.fields.code_tests import CodeCase, CodeTests
from rollyard_crds.fields.dynamic_sampling import MAX_IN_FLIGHT_ROLLOUTS, DynamicSampling
from rollyard_crds.fields.reward import RewardSpec, rounded
from rollyard_crds.fields.swe_tests import PYTEST_PARSERS, Repository, SweTests
from rollyard_crds.rolloutjob import STAGES, AgentSpec, RolloutJobSpec, TaskSource
from rollyard_crds.task import MAX_ANSWERS, MAX_DEPTH, Task, folder_problem
from rollyard_crds.trajectory import Segment
from rollyard_crds.weights import LogprobReference, WeightSource
from rollyard_tasks.task_list import TaskListError, parse_lines

PROGRAM = {"program": "assert f()"}
PRINTS = {"input": "", "output": ""}
SWE = {"script": "pytest"}
TOKENS = {
    "prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 0], "logprobs": [-1.0, 0.0],
    "policy_versions": ["v", ""],
}  # fmt: skip
CHECKPOINT, LORA = {"checkpoint": {"path": "/a"}}, {"lora": {"name": "a", "path": "/a"}}


HALF = "\ud800"


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"prompt": HALF}, "prompt"),
        ({"prompt": "p", "metadata": {"a": [{"b": f"x{HALF}"}]}}, "metadata.a[0].b"),
        ({"prompt": "p", "metadata": {HALF: 1}}, r"metadata.\ud800"),
        ({"prompt": "p", "sandbox": {"env": {"A": HALF}}}, "sandbox.env.A"),
        ({"prompt": "p", "solution": [{"name": "bash", "arguments": {"command": HALF}}]},
         "solution[0].arguments.command"),
        ({"prompt": "p", HALF: 1}, r"\ud800"),
    ],
)  # fmt: skip
def test_half_a_character_is_refused_by_line_and_field(given: dict[str, Any], place: str) -> None:
    lines = ['{"id": "a", "prompt": "\\ud83d\\ude00 is whole"}', json.dumps({"id": "b", **given})]
    with pytest.raises(TaskListError) as caught:
        parse_lines(lines)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"line 2: {place}: holds half of a character")
    with pytest.raises(ValidationError):
        Task.model_validate({"id": "b", **given})


def test_half_a_character_in_a_row_of_another_format_is_refused_by_its_field() -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": HALF}
    with pytest.raises(TaskListError, match=r"^line 1: test: holds half of a character"):
        parse_lines([json.dumps(row)], TaskSource(url="file:///a", format="humaneval"))


def nested(depth: int) -> Any:
    """Return lists in lists, so many deep."""
    made: Any = "x"
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (CodeCase, PRINTS, None),
        (CodeCase, PROGRAM, None),
        (CodeCase, {}, "either 'program'"),
        (CodeCase, {"input": ""}, "either 'program'"),
        (CodeCase, {"output": ""}, "either 'program'"),
        (CodeCase, {**PROGRAM, "input": ""}, "either 'program'"),
        (CodeCase, {**PROGRAM, "output": ""}, "either 'program'"),
        (CodeCase, {**PROGRAM, **PRINTS}, "either 'program'"),
        (CodeTests, {"cases": [PRINTS]}, None),
        (CodeTests, {"cases": [{**PRINTS, "output": "1"}, PROGRAM], "entry_point": "f"}, None),
        (CodeTests, {"cases": [PRINTS, PROGRAM]}, "'entry_point' is required"),
        (CodeTests, {"cases": [PROGRAM, PRINTS]}, "'entry_point' is required"),
        (CodeTests, {"cases": [PRINTS], "compare": "checker", "checker": "c"}, None),
        (CodeTests, {"cases": [PRINTS], "compare": "checker"}, "need each other"),
        (CodeTests, {"cases": [PRINTS], "compare": "numeric", "checker": "c"}, "need each other"),
        (CodeTests, {"cases": [PRINTS], "checker": "c"}, "need each other"),
        (Repository, {"source": "a", "unpack": "b"}, None),
        (Repository, {"archive": "a", "unpack": "b"}, None),
        (Repository, {"source": "a", "archive": "b"}, "at most one"),
        (Repository, {"unpack": "b"}, "'unpack' needs"),
        (SweTests, {**SWE, "fail_to_pass": ["a"]}, None),
        (SweTests, {**SWE, "pass_to_pass": ["a"]}, None),
        (SweTests, {**SWE, "expected": {"a": "PASSED"}}, None),
        (SweTests, SWE, "or else 'expected'"),
        (SweTests, {**SWE, "expected": {}}, "or else 'expected'"),
        (SweTests, {**SWE, "fail_to_pass": ["a"], "expected": {"a": "PASSED"}}, "or else 'expected'"),
        (SweTests, {**SWE, "pass_to_pass": ["a"], "expected": {"a": "PASSED"}}, "or else 'expected'"),
        (SweTests, {**SWE, "pass_to_pass": ["a"], "verdict": "report", "log_parser": "go"}, "of pytest"),
        (SweTests, {**SWE, "pass_to_pass": ["a"], "verdict": "report", "log_parser": "tap"}, "of pytest"),
        (SweTests, {**SWE, "pass_to_pass": ["a"], "verdict": "log", "log_parser": "go"}, None),
        *(
            (SweTests, {**SWE, "pass_to_pass": ["a"], "verdict": "report", "log_parser": parser}, None)
            for parser in sorted(PYTEST_PARSERS)
        ),
        (WeightSource, CHECKPOINT, None),
        (WeightSource, LORA, None),
        (WeightSource, {"pushed": True}, None),
        (WeightSource, {}, "exactly one"),
        (WeightSource, {**CHECKPOINT, **LORA}, "exactly one"),
        (WeightSource, {**CHECKPOINT, "pushed": True}, "exactly one"),
        (WeightSource, {**LORA, "pushed": True}, "exactly one"),
        (LogprobReference, {"promptIds": [1, 2, 3], "logprobs": [-1.0, 0.0]}, None),
        (LogprobReference, {"promptIds": [1, 2, 3], "logprobs": [-1.0]}, "1 entries, expected 2"),
        (LogprobReference, {"promptIds": [1, 2, 3], "logprobs": [-1.0] * 3}, "3 entries, expected 2"),
        (Segment, TOKENS, None),
        (Segment, {**TOKENS, "logprobs": [-1.0]}, "logprobs has 1 entries, response_ids has 2"),
        (Segment, {**TOKENS, "loss_mask": [1]}, "loss_mask has 1 entries"),
        (Segment, {**TOKENS, "policy_versions": ["v"]}, "policy_versions has 1 entries"),
        (Segment, {**TOKENS, "loss_mask": [1, 2]}, r"loss_mask\[1\] is 2"),
        (Segment, {**TOKENS, "logprobs": [-1.0, -0.5]}, r"logprobs\[1\] is -0.5"),
        (Task, {"id": "a", "prompt": "p"}, None),
        (Task, {"id": "a"}, "exactly one"),
        (Task, {"id": "a", "prompt": "p", "messages": [{"role": "user"}]}, "exactly one"),
        (Task, {"id": "a", "prompt": "p", "answers": ["7", "8"]}, None),
        (Task, {"id": "a", "prompt": "p", "answers": ["7", "8"], "answer": "7"}, "at most one of 'answer'"),
        (Task, {"id": "a", "prompt": "p", "answers": ["7"]}, "at least 2"),
        (Task, {"id": "a", "prompt": "p", "answers": ["7", " "]}, "must not be blank"),
        (Task, {"id": "a", "prompt": "p", "answers": ["7"] * (MAX_ANSWERS + 1)}, f"at most {MAX_ANSWERS}"),
        (Task, {"id": "a", "prompt": "p", "answer": ["7", "8"]}, "are a list in the field 'answers'"),
    ],
)  # fmt: skip
def test_fields_that_need_or_exclude_each_other(
    model: type[BaseModel], given: dict[str, Any], says: str | None
) -> None:
    if says is None:
        model.model_validate(given)
    else:
        with pytest.raises(ValidationError, match=says):
            model.model_validate(given)


@pytest.mark.parametrize("path", ["/app", "/a", "/testbed", "/my_folder-2", f"/{'a' * 32}"])
def test_an_empty_folder_may_be_directly_below_the_root(path: str) -> None:
    assert folder_problem(path) == ""


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "app", "/app/", "/app/b", "/App", "/2a", "/_a", "/.a", "/-a", "//a", "/app\n", "/a.b"),
        *("/work", "/tmp", "/etc", "/proc", "/dev", "/sys", "/usr", "/bin", "/sbin", "/lib", "/lib64"),
        *("/root", "/run", "/var", "/opt", "/boot", f"/{'a' * 33}"),
    ],
)
def test_no_empty_folder_hides_one_of_the_system_or_lies_deeper(path: str) -> None:
    assert folder_problem(path)


@pytest.mark.parametrize(
    ("target", "samples", "given", "found"),
    [
        (3, 2, None, 6),
        (3, 2, 1, 1),
        (3, 2, 9, 9),
        (100_000, 2, None, MAX_IN_FLIGHT_ROLLOUTS // 2),
        (100_000, 1000, None, 16),
        (8, 1024, None, 16),
        (9, 1024, None, 16),
    ],
)
def test_how_many_groups_are_in_flight(target: int, samples: int, given: int | None, found: int) -> None:
    spec = DynamicSampling(target_groups=target, max_in_flight_groups=given)
    assert spec.in_flight(samples) == found
    spec.check(samples)


def test_no_more_rollouts_are_in_flight_than_the_limit() -> None:
    DynamicSampling(target_groups=1, max_in_flight_groups=8192).check(2)
    with pytest.raises(ValueError, match="at most 16384"):
        DynamicSampling(target_groups=1, max_in_flight_groups=8192).check(3)
    with pytest.raises(ValueError, match="at least 2"):
        DynamicSampling(target_groups=1).check(1)


FORMAT = [{"name": "think", "tags": ["t"]}, {"name": "end", "pattern": "x"}]
SERVICE = {"url": "http://a/", "components": ["style", "facts"]}


@pytest.mark.parametrize(
    ("given", "weights", "own"),
    [
        ({}, {"handler": 1.0}, {"handler"}),
        ({"format": FORMAT}, {"handler": 1.0}, {"handler", "think", "end"}),
        ({"function": {"name": "f"}}, {"function": 1.0}, {"handler", "function"}),
        ({"service": SERVICE}, {"service": 1.0}, {"handler", "service", "style", "facts"}),
        (
            {"overlong": {"maxTokens": 2, "bufferTokens": 1}, "weights": {"handler": 0.5, "think": -1.0}},
            {"handler": 0.5, "think": -1.0},
            {"handler", "overlong"},
        ),
        (
            {"service": SERVICE, "weights": {"style": 2.0}},
            {"style": 2.0},
            {"handler", "service", "style", "facts"},
        ),
    ],
)  # fmt: skip
def test_the_weights_and_the_components_of_a_reward(
    given: dict[str, Any], weights: dict[str, float], own: set[str]
) -> None:
    spec = RewardSpec.model_validate(given)
    assert spec.effective_weights == weights
    assert spec.own_components() == own


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: ["a", {"b": 1, "c": value}]])
def test_a_task_is_nested_only_so_deep(wrap: Any) -> None:
    within = MAX_DEPTH - 2 if wrap(0) == 0 else MAX_DEPTH - 4
    Task.model_validate({"id": "a", "prompt": "p", "metadata": {"x": wrap(nested(within))}})
    with pytest.raises(ValidationError, match="nest 100 deep"):
        Task.model_validate({"id": "a", "prompt": "p", "metadata": {"x": wrap(nested(within + 1))}})


@pytest.mark.parametrize(
    ("own", "context", "limit"),
    [
        (None, 40_960, 40_960),
        (None, 2048, 4096),
        (None, 262_144, 65_536),
        (None, None, 16_384),
        (300, 40_960, 300),
        (300, None, 300),
    ],
)
def test_a_tools_output_is_a_share_of_the_context(own: int | None, context: int | None, limit: int) -> None:
    assert AgentSpec(max_tool_output_bytes=own).tool_output_bytes(context) == limit


def test_run_has_as_many_places_as_the_pool_and_other_stages_as_the_node() -> None:
    spec = {"tasks": {"stream": True}, "handler": "math", "backendRef": {"name": "p"}}
    job = RolloutJobSpec.model_validate(spec)
    assert [job.places(stage) for stage in STAGES] == [16, 1024, 16]
    alone = RolloutJobSpec.model_validate(spec | {"backendRef": None, "agent": {"type": "oracle"}})
    assert alone.places("run") == 64, "no pool bounds it"
    own = RolloutJobSpec.model_validate(spec | {"stages": {"run": {"concurrency": 2000}}})
    assert own.places("run") == 2000


@pytest.mark.parametrize(
    ("reward", "text"),
    [(0.38461538461538464, "0.385"), (1, "1.000"), (0, "0.000"), (-0.5, "-0.500"), (0.00123456, "0.00123")],
)
def test_a_reward_is_rounded_for_people(reward: float, text: str) -> None:
    assert rounded(reward) == text


@pytest.mark.parametrize("name", ["../a", "a/b", ".hidden", "..", "", "a b", "a\n", "x" * 129])
def test_a_file_of_a_harness_has_the_name_of_a_file(name: str) -> None:
    """The API server cannot check the keys of an object, so the control plane refuses them."""
    with pytest.raises(ValidationError, match="files"):
        AgentSpec(type="harness", harness="command", command="x", files={name: ""})
