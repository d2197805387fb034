"""Rows of other data sets become tasks, and what is no row is refused by number and field."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.formats import TaskFormat, registry
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.parquet_rows import ParquetProblem, json_lines
from rollyard_tasks.task_list import TaskListError, parse_lines

VERL: dict[str, Any] = {
    "data_source": "math dapo/17k",
    "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": "1 + 1?"}],
    "ability": "MATH",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


def mapped(rows: list[dict[str, Any]], name: str, **options: Any) -> list[Task]:
    source = TaskSource.model_validate({"url": "x", "format": name, **options})
    return parse_lines([json.dumps(row) for row in rows], source)


def test_a_verl_row() -> None:
    (task,) = mapped([VERL], "verl")
    assert task.id == "math_20_dapo_2f_17k/train/7"
    assert [(m.role, m.content) for m in task.chat()] == [("system", ""), ("user", "1 + 1?")]
    assert task.answer == "2"
    assert task.metadata["data_source"] == "math dapo/17k"
    assert task.metadata["extra_info"] == {"split": "train", "index": 7}


@pytest.mark.parametrize(
    ("truth", "answer"),
    [(72, "72"), (0.5, "0.5"), ('["\\\\frac12"]', "\\frac12"), ("[0, 1)", "[0, 1)"), ("[1, 2]", "[1, 2]")],
)
def test_ground_truths_of_verl(truth: Any, answer: str) -> None:
    (task,) = mapped([{**VERL, "reward_model": json.dumps({"ground_truth": truth})}], "verl")
    assert task.answer == answer


@pytest.mark.parametrize(
    ("truth", "answers"),
    [
        (["7"], ["7"]), ([7, 7.0, "7"], ["7"]), (["7", "seven"], ["7", "seven"]),
        ([0.5, "1/2"], ["0.5", "1/2"]),
        ('["7", "seven"]', ["7", "seven"]), ('["7"]', ["7"]), ("[7, 8]", ["[7, 8]"]), (72.0, ["72"]),
    ],
)  # fmt: skip
def test_accepted_answers_of_verl(truth: Any, answers: list[str]) -> None:
    (task,) = mapped([{**VERL, "reward_model": {"ground_truth": truth}}], "verl")
    assert task.accepted_answers() == answers
    assert (task.answers is None) == (len(answers) == 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt": "1 + 1?"}, "prompt: is a text that is not JSON"),
        ({"prompt": ["x"]}, r"prompt\[0\]: must be an object with role and content"),
        ({"prompt": [{"role": "judge", "content": "x"}]}, r"prompt\[0\].role: "),
        ({"prompt": []}, "prompt: must not be empty"),
        ({"reward_model": {}}, "reward_model.ground_truth: is missing"),
        (
            {"reward_model": {"ground_truth": []}},
            "reward_model.ground_truth: must be 1 to 64 accepted answers",
        ),
        ({"reward_model": {"ground_truth": "[]"}}, "reward_model.ground_truth: must be 1 to 64 accepted"),
        ({"reward_model": {"ground_truth": [True]}}, "reward_model.ground_truth: must be a text or a number"),
        ({"reward_model": {"ground_truth": ["7", " "]}}, "reward_model.ground_truth: must not be empty"),
        ({"data_source": None}, "data_source: is missing"),
        ({"data_source": 3}, "data_source: must be a text"),
        ({"extra_info": [1]}, "extra_info: must be an object"),
    ],
)
def test_a_refused_row_is_named_by_number_and_field(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"^line 2: {problem}"):
        mapped([VERL, {**VERL, **change}], "verl")


def test_a_row_without_an_id_has_its_number() -> None:
    rows = [{**VERL, "extra_info": None, "prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(3)]
    assert [task.id for task in mapped(rows, "verl")] == ["1", "2", "3"]


parts = st.lists(st.text(max_size=40), min_size=1, max_size=4)


@given(parts, parts)
def test_ids_are_valid_and_differ(one: list[str], other: list[str]) -> None:
    assert Task(id=task_id(*one), prompt="?").id == task_id(*one)
    assert (task_id(*one) == task_id(*other)) == (one == other)


def test_long_ids_differ() -> None:
    assert len({task_id("x" * 300 + end) for end in ("", "y", "/")}) == 3


def test_a_format_that_is_not_installed() -> None:
    with pytest.raises(TaskListError, match=r"format: no task format 'arc' is installed; installed: .*verl"):
        mapped([VERL], "arc")


def test_a_format_that_fails_refuses_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TaskFormat):
        def task(self, row: Any) -> dict[str, Any]:
            raise KeyError(row.values["data_source"])

    monkeypatch.setattr("rollyard_tasks.task_list.task_format", lambda _name: Broken())
    with pytest.raises(TaskListError, match=r"^line 1: the format cannot read it \(KeyError\)$"):
        mapped([VERL], "verl")


def test_the_default_format_needs_no_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    assert len(parse_lines(['{"id": "a", "prompt": "?"}'], TaskSource(url="x"))) == 1


def test_parquet_gives_the_same_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    rows = [{**VERL, "extra_info": {"split": "train", "index": i}} for i in range(200)]
    parquet.write_table(arrow.Table.from_pylist(rows), file)
    source = TaskSource(url="x", format="verl")
    found = parse_lines(json_lines(io.BytesIO(file.getvalue())), source)
    assert found == mapped(rows, "verl")
    with pytest.raises(ParquetProblem, match="damaged"):
        list(json_lines(io.BytesIO(file.getvalue()[:-9])))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ParquetProblem, match=r"pip install 'rollyard\[parquet\]'"):
        list(json_lines(io.BytesIO(file.getvalue())))


MMLU = {"question": "?", "choices": ["x", "y"], "answer": 1}
GPQA = {"Question": "?", "Correct Answer": "r", **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}}
MBPP = {"text": "?", "code": "def f(): return 1", "test_list": ["assert f() == 1"], "task_id": 3}
CONTEST = {"question_content": "?", "public_test_cases": '[{"input": "1", "output": "2"}]'}
HUMANEVAL = {
    "task_id": "a/1", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n",
    "test": "def check(f): assert f() == 1",
}  # fmt: skip
ARC = {"question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2", "id": "M_7"}
APPS = {"question": "?", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}
UNITED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mcq", MMLU, ["options", "id", "category", *GPQA]),
    ("mcq", {"question": "?", "options": ["x", "y"], "answer": "A"}, ["choices", *GPQA]),
    ("mcq", GPQA, ["question", "choices", "options", "answer", "Subdomain"]),
    ("mcq", ARC, ["options", "answer", "question_id", "question_stem", "category"]),
    ("math", {"problem": "?", "answer": "7"}, ["question", "Problem", "id", "choices", "image", "solution"]),
    ("math", {"problem": "?", "solution": r"\boxed{7}"}, ["answer", "expected_answer", "ID"]),
    ("apps", APPS, ["starter_code", "solutions", "problem_id", "difficulty"]),
    ("verl", VERL, ["choices"]),
    (
        "verl",
        {key: VERL[key] for key in ("data_source", "prompt", "reward_model")},
        ["ability", "extra_info"],
    ),
    ("mbpp", MBPP, ["prompt", "test_setup_code", "test_imports"]),
    ("mbpp", {**{key: MBPP[key] for key in ("code", "test_list")}, "prompt": "?"}, ["text", "task_id"]),
    ("livecodebench", CONTEST, ["private_test_cases", "starter_code", "metadata", "question_id", "platform"]),
    ("humaneval", {key: HUMANEVAL[key] for key in HUMANEVAL if key[0] != "c"}, ["canonical_solution"]),
]
"""A format, a row, and the columns that the row gets where it is united with rows of other data sets."""


@pytest.mark.parametrize("null", [None, float("nan"), {"a": None, "b": {"c": None}}], ids=repr)
@pytest.mark.parametrize(("name", "row", "columns"), UNITED)
def test_a_null_column_is_an_absent_one(
    name: str, row: dict[str, Any], columns: list[str], null: object
) -> None:
    assert mapped([{**dict.fromkeys(columns, null), **row}], name) == mapped([row], name)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"question": "?", "choices": ["x", "y", "z"], "answer": 2}, "C"),
        ({"question": "?", "options": ["x", "y", "z"], "answer": "b"}, "B"),
        ({"question": "?", "choices": '["x", "y", "z"]', "answer": "y"}, "B"),
        ({"question": "?", "choices": ["10", "20", "30"], "answer": "20"}, "B"),
        ({"question": "?", "choices": ["x", "y", "z"], "answer": "0"}, "A"),
        ({"question": "?", "choices": ["0", "1", "2"], "answer": "1"}, "B"),
        ({"question": "?", "choices": ["B", "C", "A"], "answer": "A", "answer_letter": "C"}, "C"),
        ({"question": "?", "choices": ["B", "C", "A"], "answer": "A", "answer_index": 0}, "A"),
    ],
)
def test_rows_of_multiple_choice(row: dict[str, Any], answer: str) -> None:
    (task,) = mapped([row], "mcq")
    assert task.answer == answer
    assert task.prompt is not None
    assert f"{answer}. {json.loads(row['choices'])[1] if row['answer'] == 'y' else ''}" in task.prompt


def test_an_id_of_multiple_choice_may_hold_any_character() -> None:
    names = ["test/7", "a b", "a_b", "ä?", "x" * 200]
    rows = [{"question": "?", "choices": ["x", "y"], "answer": 0, "id": name} for name in names]
    assert [task.id for task in mapped(rows, "mcq")][:4] == [
        "test/7",
        "a_20_b",
        "a_5f_b",
        "sha256:" + hashlib.sha256(b"_e4__3f_").hexdigest(),
    ]
    with pytest.raises(TaskListError, match=r"^line 1: id: must not be empty"):
        mapped([{**rows[0], "id": ""}], "mcq")


def test_rows_of_gpqa() -> None:
    row = {"Question": "?", "Correct Answer": "r\n", **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}}
    rows = [{**row, "Question": f"{i}?"} for i in range(40)]
    tasks = mapped(rows, "mcq")
    assert tasks == mapped(rows, "mcq")
    assert {task.answer for task in tasks} == set("ABCD")
    assert all(task.choices and task.choices["ABCD".index(task.answer or "")] == "r" for task in tasks)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answer": 4}, "answer: must be the letter"), ({"answer": True}, "answer: must be the letter"),
        ({"answer": None}, "answer: must be the letter"), ({"choices": ["x"]}, "choices: must be 2 to 26"),
        # An index and a text, as in MMLU in CSV; a letter and a text; two columns that differ.
        ({"answer": "1", "choices": ["1", "2"]}, "answer: must mean one choice"),
        ({"answer": "A", "choices": ["B", "A"]}, "answer: must mean one choice"),
        ({"answer": "A", "answer_index": 1}, "answer: must mean one choice"),
        ({"choices": ["x", " "]}, r"choices\[1\]: must be a text"),
        ({"choices": None}, "choices: is missing"),
        ({"question": ""}, "question: must not be empty"),
    ],
)  # fmt: skip
def test_refused_rows_of_multiple_choice(change: dict[str, Any], problem: str) -> None:
    row = {"question": "?", "choices": ["x", "y"], "answer": 0}
    with pytest.raises(TaskListError, match=f"^line 1: {problem}"):
        mapped([{**row, **change}], "mcq")


def test_verl_rows_of_multiple_choice() -> None:
    row = {**VERL, "ability": "multiple_choice", "reward_model": {"ground_truth": "C"}}
    (task,) = mapped([row], "verl")
    assert task.choices == list("ABCDEFGHIJ")
    (task,) = mapped([{**row, "extra_info": {"choices": ["x", "y", "z"]}}], "verl")
    assert (task.id, task.choices) == ("1", ["x", "y", "z"])
    with pytest.raises(TaskListError, match="must be one letter for multiple choice"):
        mapped([{**row, "reward_model": {"ground_truth": ["A", "C"]}}], "verl")
    with pytest.raises(TaskListError, match="must be a letter from A to J"):
        mapped([{**row, "reward_model": {"ground_truth": "42"}}], "verl")
