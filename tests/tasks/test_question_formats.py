"""Tables of questions and answers as they are published, each row on a line, and rows of the wrong format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rollyard.main import main
from rollyard_crds import Task
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.formats import TaskFormat, registry
from rollyard_tasks.task_list import TaskListError, parse_lines

BOX = r"So \boxed{\frac12}."
GSM8K = {"question": "2 eggs at $40,000?", "answer": "It is 2*40,000=<<2*40000=80000>>80,000.\n#### 80,000"}
DEEPSCALER = {"problem": "1 + 1?", "answer": "2", "solution": r"See \boxed{2}."}
AIME = {"ID": "2024-II-4", "Problem": "1 + 1?", "Solution": "It is 204.", "Answer": 204}
AIME_1983 = {"ID": "1983-1", "Year": 1983, "Problem Number": 1, "Question": "?", "Answer": "060", "Part": "I"}
MATH = {"problem": "?", "level": "Level 5", "type": "Algebra", "solution": BOX}
MATH_500 = {
    "problem": "?",
    "solution": BOX,
    "answer": r"\frac12",
    "subject": "A",
    "unique_id": "test/a/1.json",
}
NUMINA = {"source": "aops", "problem": "?", "solution": BOX, "messages": [{"role": "user", "content": "?"}]}
OPEN_MATH = {"problem": "?", "generated_solution": BOX, "expected_answer": "7", "problem_source": "math"}
MMLU_PRO = {
    "question_id": 70,
    "question": "?",
    "options": ["x", "y", "z"],
    "answer": "C",
    "answer_index": 2,
    "cot_content": "A: It is (C).",
    "category": "business",
    "src": "ori_mmlu-business_ethics",
}
ARC = {"id": "Mercury_7", "question": "?", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}}
TACO = {
    "question": "Add.",
    "solutions": '["print(3)", "print(4)"]',
    "starter_code": "",
    "difficulty": "EASY",
    "input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}',
    "time_limit": "2.0 seconds",
    "source": "codeforces",
}
APPS = {
    **TACO,
    "problem_id": 4,
    "starter_code": "def add(a, b):\n\t",
    "input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": ["ok"]}',
}


def mapped(row: dict[str, Any], name: str) -> Task:
    (task,) = parse_lines([json.dumps(row)], TaskSource(url="x", format=name))
    return task


@pytest.mark.parametrize(
    ("row", "key", "name", "metadata"),
    [
        (GSM8K, "80,000", "1", {}),
        ({"question": "?", "answer": "#### 3\nno\n#### -4.5 "}, "-4.5", "1", {}),
        ({"question": "?", "answer": "#### Step 1\nIt is 7."}, "#### Step 1\nIt is 7.", "1", {}),
        (DEEPSCALER, "2", "1", {}),
        (AIME, "204", "2024-II-4", {}),
        ({**AIME, "Answer": 204.0, "ID": 7.0}, "204", "7", {}),
        ({**AIME, "Answer": 0.5, "ID": 7}, "0.5", "7", {}),
        (AIME_1983, "060", "1983-1", {"Year": 1983, "Problem Number": 1, "Part": "I"}),
        (MATH, BOX, "1", {"level": "Level 5", "type": "Algebra"}),
        (MATH_500, r"\frac12", "test/a/1.json", {"subject": "A"}),
        (NUMINA, BOX, "1", {"source": "aops"}),
        ({**NUMINA, "answer": "", "question": ""}, BOX, "1", {"source": "aops"}),
        (OPEN_MATH, "7", "1", {"problem_source": "math"}),
        ({"question": "?", "answer": "[0, 1)"}, "[0, 1)", "1", {}),
    ],
)
def test_rows_of_mathematics(row: dict[str, Any], key: str, name: str, metadata: dict[str, Any]) -> None:
    """The solution stands neither in the prompt nor in what comes back."""
    task = mapped(row, "math")
    question = next(row[name] for name in ("question", "problem", "Question", "Problem") if row.get(name))
    assert task.prompt == f"{question}\n\nPut your final answer within \\boxed{{}}."
    assert (task.answer, task.id, task.metadata, task.solution) == (key, name, metadata, None)


def test_accepted_answers_of_mathematics() -> None:
    assert mapped({"problem": "?", "answer": [7, "7.0", "VII"]}, "math").answers == ["7", "7.0", "VII"]
    assert mapped({"problem": "?", "answer": '["7"]'}, "math").answer == "7"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answer": None}, "answer: is missing"),
        ({"answer": " "}, "answer: must not be empty"),
        ({"answer": True}, "answer: must be a text or a number"),
        ({"answer": {"a": 1}}, "answer: must be a t"),
        ({"answer": float("inf")}, "answer: must be a text or a number"),
        ({"answer": []}, "answer: must be 1 to"),
        ({"answer": [float("nan")]}, "answer: must be a text or a number"),
        ({"answer": list(range(65))}, "answer: must be 1 to 64 accepted answers"),
        ({"answer": "It is\n####"}, "answer: has nothing after ####"),
        ({"answer": "proof"}, "answer: says that there is no answer"),
        (
            {"answer": None, "solution": "It is 7."},
            r"solution: has no \\boxed\{…\}, and there is no column 'ans",
        ),
        ({"question": None}, "question: is missing"),
        ({"question": ""}, "question: must not be empty"),
        ({"question": 7}, "question: must be a text"),
        ({"id": ""}, "id: must not be empty"),
        ({"id": [1]}, "id: must be a text"),
        ({"id": True}, "id: must be a text"),
        ({"problem": "!"}, "problem: cannot stand beside 'question'"),
        ({"Answer": "8"}, "Answer: cannot stand beside 'answer'"),
        ({"choices": ["7", "8"]}, "choices: is part of the question"),
        ({"image": "b64"}, "image: holds pictures"),
        ({"Body": "There are 9."}, "Body: is part of the question"),
        # The choices of C-Eval, MMMLU, MedMCQA and others.
        ({"A": "7", "B": "8", "answer": "B"}, "A: is part of the question"),
        ({"opa": "7", "opb": "8"}, "opa: is part of the question"),
        ({"option_1": "7", "option_2": "8"}, "option_1: is part of the question"),
    ],
)
def test_refused_rows_of_mathematics(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"^line 1: {problem}"):
        mapped({"question": "?", "answer": "7", "images": [], **change}, "math")


def test_rows_of_mmlu_pro() -> None:
    task = mapped(MMLU_PRO, "mcq")
    assert (task.id, task.answer, task.choices) == ("70", "C", ["x", "y", "z"])
    assert task.metadata == {"category": "business", "src": "ori_mmlu-business_ethics"}
    assert "It is (C)" not in task.model_dump_json()


@pytest.mark.parametrize(
    ("labels", "key", "answer"),
    [
        (["A", "B", "C"], "B", "B"),
        (["1", "2", "3"], "3", "C"),
        (["B", "C", "A"], "A", "C"),
        ([1, 2, 3], 1, "A"),
    ],
)
def test_rows_of_arc(labels: list[Any], key: Any, answer: str) -> None:
    """The prompt shows the letters with which the answer is compared, whatever the labels are."""
    for name in ("question", "question_stem"):
        row = {**ARC, "choices": {"text": ["x", "y", "z"], "label": labels}, "answerKey": key}
        row[name] = row.pop("question")
        task = mapped(row, "mcq")
        assert (task.id, task.answer, task.choices) == ("Mercury_5f_7", answer, ["x", "y", "z"])
        assert "\nA. x\nB. y\nC. z\n" in (task.prompt or "")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"answerKey": "D"}, "answerKey: must be the label of one choice"),
        ({"answerKey": None}, "answerKey: must be the label of one choice"),
        ({"choices": {"text": ["x", "y"], "label": ["A"]}}, "choices.label: must be as many as the texts"),
        ({"choices": {"text": ["x", "y"], "label": ["A", "A"]}}, "choices.label: must be as many"),
        ({"choices": {"text": ["x", ""], "label": ["A", "B"]}}, r"choices.text\[1\]: must be a text"),
        ({"choices": {"text": ["x"], "label": ["A"]}}, "choices: must be 2 to 26 texts"),
        ({"choices": {"label": ["A"]}}, "choices.text: is missing"),
        ({"choices": "{"}, "choices: is a text that"),
    ],
)
def test_refused_rows_of_arc(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"^line 1: {problem}"):
        mapped({**ARC, "answerKey": "A", **change}, "mcq")


def test_rows_of_apps_and_taco() -> None:
    program, function = mapped(TACO, "apps"), mapped(APPS, "apps")
    assert (
        program.prompt
        == "Add.\n\nWrite a Python program that reads standard input and writes standard output."
    )
    assert function.prompt == "Add.\n\nComplete this Python code:\n\n```python\ndef add(a, b):\n\t\n```"
    assert (program.id, function.id) == ("1", "4")
    assert program.metadata == {"difficulty": "EASY", "source": "codeforces", "time_limit": "2.0 seconds"}
    for task, name in ((program, None), (function, "add")):
        assert task.tests is not None
        assert (task.tests.entry_point, task.tests.compare) == (name, "numeric")
        assert task.solution is not None
        assert task.solution[0].arguments == {"answer": "```python\nprint(3)\n```"}
    assert mapped({**TACO, "solutions": ""}, "apps").solution is None
    starter = mapped({**TACO, "starter_code": "import sys"}, "apps").prompt or ""
    assert starter.endswith(
        "```\n\nWrite a Python program that reads standard input and writes standard output."
    )
    bare = mapped({**APPS, "starter_code": None}, "apps").prompt or ""
    assert bare.endswith("\n\nWrite the Python function add.")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"input_output": None}, "input_output: is missing"),
        ({"input_output": ""}, "input_output: is a text that"),
        ({"input_output": f"[{'7' * 5000}]"}, "input_output: has an integer of more than 4,300 digits"),
        ({"input_output": "{}"}, "input_output.inputs: is missing"),
        ({"input_output": '{"inputs": [], "outputs": []}'}, "input_output.outputs: must be as many"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "input_output.outputs: must be as many"),
        (
            {"input_output": '{"inputs": [[1]], "outputs": [1], "fn_name": 3}'},
            "input_output.fn_name: must be a t",
        ),
        (
            {"input_output": {"inputs": ["1"] * 1025, "outputs": ["1"] * 1025}},
            "input_output.inputs: must be at most 1024",
        ),
        ({"solutions": "print(3)"}, "solutions: is a text that is not JSON"),
        ({"question": None}, "question: is m"),
    ],
)
def test_refused_rows_of_apps(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"^line 1: {problem}"):
        mapped({**TACO, **change}, "apps")


VERL = {
    "data_source": "x",
    "prompt": [{"role": "user", "content": "?"}],
    "reward_model": {"ground_truth": "7"},
}
ELSEWHERE = [
    (GSM8K, "question and answer", "math"),
    (DEEPSCALER, "problem and answer", "math"),
    (AIME, "Problem and Answer", "math"),
    (MATH, "problem and solution", "math"),
    (OPEN_MATH, "problem and expected_answer", "math"),
    (MMLU_PRO, "question, options and answer", "mcq"),
    ({**ARC, "answerKey": "A"}, "question, choices and answerKey", "mcq"),
    (APPS, "question, input_output and solutions", "apps"),
    (VERL, "data_source, prompt and reward_model", "verl"),
    ({"task_id": 1, "text": "?", "code": "", "test_list": []}, "text, code and test_list", "mbpp"),
    (
        {"question_content": "?", "public_test_cases": "[]"},
        "question_content and public_test_cases",
        "livecodebench",
    ),
    ({"instance_id": "a", "eval_script": "x"}, "instance_id and eval_script", "swebench"),
    ({"path": "a", "task_binary": "x"}, "path and task_binary", "harbor"),
    ({"id": "a", "prompt": "?", "answer": "7"}, "id and prompt", "rollyard"),
]


@pytest.mark.parametrize(("row", "columns", "name"), ELSEWHERE)
def test_a_row_of_another_format_is_refused_with_its_name(
    row: dict[str, Any], columns: str, name: str
) -> None:
    says = f"rows with {columns} are read by tasks.format: {name}"
    for other in {"rollyard", "humaneval"} - {name}:
        with pytest.raises(TaskListError) as refused:
            mapped(row, other)
        (problem,) = refused.value.problems
        assert problem.endswith(f"; {says}"), problem
        assert "did you mean" not in problem
    assert problem.startswith("line 1: ")


def test_a_row_of_the_right_format_is_refused_without_advice() -> None:
    with pytest.raises(TaskListError) as refused:
        parse_lines(['{"id": "a", "prompt": "?", "question": "?", "answer": 7, "anwser": "7"}'])
    assert refused.value.problems[1:] == [
        "line 1: question: unknown field; known: " + ", ".join(Task.model_fields),
        "line 1: anwser: unknown field; did you mean 'answer'?",
    ]
    with pytest.raises(TaskListError, match=r"^line 1: answer: must be the letter, the index or the text"):
        mapped({**MMLU_PRO, "answer": "Q"}, "mcq")
    with pytest.raises(TaskListError, match=r"^line 1: messages\[0\]\.content: must be a string \(got 5\)$"):
        mapped({"id": "a", "messages": [{"role": "user", "content": 5}]}, "chat")
    with pytest.raises(
        TaskListError, match=r"options: is part of the question.*; rows .* tasks.format: mcq$"
    ):
        mapped(MMLU_PRO, "math")


def test_a_format_that_cannot_be_loaded_hides_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name = "broken"

        def load(self) -> type[TaskFormat]:
            raise ImportError("no such module")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Broken()])
    with pytest.raises(TaskListError, match=r"^line 1: id: is missing"):
        parse_lines(['{"question": "?"}'])


def test_validate_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps(GSM8K) + "\n")
    assert main(["validate", "-f", str(path)]) == 1
    says = "line 1: is not a task; rows with question and answer are read by tasks.format: math"
    assert says in capsys.readouterr().err
    assert main(["validate", "-f", str(path), "--format", "math", "--handler", "math"]) == 0
    assert "1 tasks are valid" in capsys.readouterr().out
