"""Rows of SWE-bench and of the data sets that are built like it become tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from rollyard_crds import Task
from rollyard_crds.fields.signals import task_warnings
from rollyard_crds.fields.swe_tests import SweTests
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.formats.parquet_rows import json_lines
from rollyard_tasks.task_list import TaskListError, parse_lines, parse_specs

PATCH = "diff --git a/a/b.py b/a/b.py\n--- a/a/b.py\n+++ b/a/b.py\n@@ -1 +1 @@\n-x\n+y\n"
TESTS = PATCH.replace("a/b.py", "tests/test_b.py") + PATCH.replace("a/b.py", "tests/data.json")
ROW: dict[str, Any] = {
    "instance_id": "Acme__tool-7", "repo": "acme/tool", "problem_statement": "It fails.", "version": "1.2",
    "base_commit": "c0ffee", "patch": PATCH, "FAIL_TO_PASS": '["tests/test_b.py::x"]',
    "PASS_TO_PASS": ["tests/test_b.py::y"],
}  # fmt: skip
VERSION_5 = {
    **ROW, "image": "acme/image:1", "log_parser": "parse_log_pytest_v2", "eval_type": "pass_and_fail",
    "eval_script": f"cd /testbed\ngit apply - <<'E'\n{TESTS}E\npytest -rA tests/test_b.py\n",
}  # fmt: skip
CLASSIC = {**ROW, "test_patch": TESTS, "environment_setup_commit": "c0ffee", "hints_text": ""}
REBENCH = {
    **ROW, "test_patch": TESTS,
    "install_config": {"log_parser": "parse_log_pytest", "test_cmd": "pytest -rA", "install": "pip ."},
}  # fmt: skip
REBENCH_2 = {
    **REBENCH, "image_name": "swe/v2:1", "language": "go", "interface": "",
    "install_config": {"log_parser": "parse_log_gotest", "test_cmd": ["go vet ./...", "go test -v ./..."]},
}  # fmt: skip
SMITH = {
    "instance_id": "acme__tool.12345678.x", "repo": "swesmith/acme__tool.12345678", "patch": PATCH,
    "image_name": "jyangballin/swesmith.x86_64.acme_1776_tool.12345678", "problem_statement": "It fails.",
    "FAIL_TO_PASS": ["tests/test_b.py::x"], "PASS_TO_PASS": [],
}  # fmt: skip
R2E = {
    "repo_name": "tool", "docker_image": "namanjain12/tool_final:c0ffee", "problem_statement": "It fails.",
    "expected_output_json": json.dumps({"C.x": "PASSED", "C.y": "FAILED"}),
}  # fmt: skip
SPECS = {
    "repos": {
        "acme/tool": {
            "log_parser": "pytest",
            "versions": {
                "1.2": {"test_cmd": "pytest -rA", "eval_commands": ["locale-gen"], "install": "pip ."}
            },
        },
        "django/django": {"log_parser": "django", "versions": {"1.2": {"test_cmd": "./tests/runtests.py"}}},
    }
}


def mapped(*rows: dict[str, Any], specs: dict[str, Any] | None = None) -> list[Task]:
    source = TaskSource(url="x", format="swebench")
    return parse_lines([json.dumps(row) for row in rows], source, specs=specs)


def swe_of(row: dict[str, Any], specs: dict[str, Any] | None = None) -> tuple[Task, SweTests]:
    (task,) = mapped(row, specs=specs)
    assert task.swe is not None
    return task, task.swe


def test_a_row_of_version_5() -> None:
    task, tests = swe_of(VERSION_5)
    assert task.id == "Acme_5f__5f_tool-7"
    assert task.prompt is not None
    assert task.prompt.startswith("Change the repository in /testbed")
    assert task.prompt.endswith("It fails.")
    assert "test_b" not in task.prompt
    assert task.sandbox.image == "docker://acme/image:1"
    assert tests.script == VERSION_5["eval_script"]
    assert (tests.log_parser, tests.verdict) == ("pytest_v2", "report")
    assert tests.fail_to_pass == ["tests/test_b.py::x"]
    assert tests.pass_to_pass == ["tests/test_b.py::y"]
    assert {"tests/test_b.py", "tests/data.json"} <= set(tests.protected)
    assert tests.patch is None
    assert task.metadata == {"repo": "acme/tool", "base_commit": "c0ffee", "version": "1.2"}
    assert task.solution is not None
    assert f"git apply --whitespace=nowarn - <<'END_OF_PATCH'\n{PATCH}END_OF_PATCH" in str(
        task.solution[0].arguments["command"]
    )


def test_where_results_are_taken_from() -> None:
    script = VERSION_5["eval_script"]
    for change, verdict in (
        ({"eval_script": f"{script}PYTHONPATH=. pytest"}, "log"),
        ({"eval_script": f'{script}PYTHONPATH="$PYTHONPATH:." pytest'}, "report"),
        ({"eval_script": f'{script}export PYTHONPATH=$PYTHONPATH:$PWD\npytest'}, "report"),
        ({"eval_script": f'{script}PYTHONPATH="${{PYTHONPATH}}:." pytest'}, "report"),
        # What comes first could hide modules that Python loads at its start.
        ({"eval_script": f'{script}PYTHONPATH="src:$PYTHONPATH" pytest'}, "log"),
        ({"eval_script": f"{script}PYTHONPATH=$PYTHONPATHS pytest"}, "log"),
        ({"eval_script": f"{script}PYTEST_ADDOPTS= pytest"}, "log"), ({"log_parser": "django"}, "log"),
    ):  # fmt: skip
        assert swe_of({**VERSION_5, **change})[1].verdict == verdict
    assert swe_of({**VERSION_5, "eval_type": "fail_only"})[1].absent_passes


def test_rows_from_before_version_5_need_specs() -> None:
    task, tests = swe_of(CLASSIC, SPECS)
    assert task.sandbox.image == "docker://swebench/sweb.eval.x86_64.acme_1776_tool-7:latest"
    assert tests.patch == TESTS
    lines = tests.script.splitlines()
    assert lines.index("locale-gen") < lines.index("pip .") < lines.index("pytest -rA tests/test_b.py")
    gym, _ = swe_of({name: CLASSIC[name] for name in CLASSIC if "environment" not in name}, SPECS)
    assert gym.sandbox.image == "docker://xingyaoww/sweb.eval.x86_64.acme_s_tool-7:latest"
    _, django = swe_of({**CLASSIC, "repo": "django/django"}, SPECS)
    assert "./tests/runtests.py test_b\n" in django.script
    assert (django.log_parser, django.verdict) == ("django", "log")


def test_rows_of_rebench() -> None:
    task, tests = swe_of(REBENCH)
    assert task.sandbox.image == "docker://swerebench/sweb.eval.x86_64.acme_1776_tool-7:latest"
    assert "\ncd /testbed\n" in tests.script
    assert "\npytest -rA tests/test_b.py\n" in tests.script
    second, tests = swe_of(REBENCH_2)
    assert second.sandbox.image == "docker://swe/v2:1"
    described, _ = swe_of({**REBENCH_2, "interface": "class Tool\n"})
    assert described.prompt == f"{second.prompt}\n\nThe tests use this interface:\n\nclass Tool"
    assert tests.repository.path == "/tool"
    assert "go vet ./...\ngo test -v ./...\n" in tests.script
    assert (tests.log_parser, tests.verdict) == ("go", "log")


V1 = ("/testbed", "docker://swerebench/sweb.eval.x86_64.acme_1776_tool-7:latest")
V2 = ("/tool", "docker://swe/v2:1")
GO = REBENCH_2["install_config"]
EDITIONS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    (REBENCH, V1),
    (REBENCH_2, V2),
    # What a row has to say of its image does not make it one of the second version.
    ({**REBENCH, "image_name": None}, V1),
    ({**REBENCH, "image_name": "", "docker_image": None, "image": ""}, V1),
    ({**REBENCH, "image_name": "acme/own:1"}, ("/testbed", "docker://acme/own:1")),
    ({**REBENCH, "docker_image": "acme/first:1", "image_name": "x"}, ("/testbed", "docker://acme/first:1")),
    ({**REBENCH, "language": "python", "interface": None, "image_name": float("nan")}, V1),
    # Columns of different types are united as texts.
    ({**REBENCH, "install_config": json.dumps(REBENCH["install_config"])}, V1),
    ({**REBENCH_2, "install_config": json.dumps(GO)}, V2),
    ({**REBENCH_2, "install_config": {**GO, "test_cmd": json.dumps(GO["test_cmd"])}}, V2),
    ({**REBENCH, "install_config": {"test_cmd": "[ -f x ] && pytest"}}, V1),
    (
        {
            **REBENCH,
            "install_config": {"test_cmd": "pytest", "log_parser": None, "docker_specs": {"go": None}},
        },
        V1,
    ),
]
"""Rows of SWE-rebench, with the folder and the image that they are about."""


@pytest.mark.parametrize(("row", "expected"), EDITIONS)
def test_the_two_versions_of_rebench_are_told_apart_by_their_commands(
    row: dict[str, Any], expected: tuple[str, str]
) -> None:
    task, tests = swe_of(row)
    assert (tests.repository.path, task.sandbox.image) == expected
    assert ("conda activate testbed" in tests.script) is (expected[0] == "/testbed")


KINDS = {
    "version_5": VERSION_5,
    "classic": CLASSIC,
    "gym": {name: CLASSIC[name] for name in CLASSIC if "environment" not in name},
    "rebench": REBENCH,
    "rebench_2": REBENCH_2,
    "smith": SMITH,
    "r2e": R2E,
}
NULLS: dict[str, Any] = {
    "null": None,
    "nan": float("nan"),
    "nulls": {"a": None, "b": {"c": None}},
    "text": "",
    "json": "null",
    "list": [],
}


@pytest.mark.parametrize("null", NULLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_several_data_sets_has_the_columns_of_all(kind: str, null: str) -> None:
    columns = {name for row in KINDS.values() for name in row} | {"repository", "docker_image", "eval_type"}
    united = {**dict.fromkeys(columns, NULLS[null]), **KINDS[kind]}
    assert mapped(united, specs=SPECS) == mapped(KINDS[kind], specs=SPECS)


def test_a_parquet_file_of_several_data_sets(tmp_path: Path) -> None:
    """Arrow gives every row the columns of all, and every object the fields of all."""
    kinds = [REBENCH, SMITH, R2E, VERSION_5]
    rows = [
        {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()}
        for row in kinds
    ]
    table = arrow.concat_tables([arrow.Table.from_pylist([row]) for row in rows], promote_options="default")
    parquet.write_table(table, tmp_path / "rows.parquet")
    with (tmp_path / "rows.parquet").open("rb") as file:
        read = [json.loads(line) for line in json_lines(file)]
    assert all("image_name" in row for row in read)
    assert [mapped(row) for row in read] == [mapped(row) for row in kinds]


UNREPORTED = [
    "[100%]", "[ 50%]", "[", "[1]", "50%]", "...", "", " ", "PASSED", "FAILED:", "====", "----",
    "=== 3 passed in 0.1s ===", "==== test session starts ====", "_____",
]  # fmt: skip
"""Names that logs have been read into, and that no test runner reports."""
REPORTED = [
    "t.py::a[100%]", "t.py::a[1]", "a ... b", "passed", "1", "[a]", "100%", "==", "- adds", "test_a (m.C)",
    "FAILED a",
]  # fmt: skip


@pytest.mark.parametrize("name", UNREPORTED)
def test_a_name_that_no_runner_reports_is_left_out(name: str) -> None:
    wanted = {"FAIL_TO_PASS": ["t.py::a", name], "PASS_TO_PASS": json.dumps([name])}
    task, tests = swe_of({**REBENCH, **wanted})
    assert (tests.fail_to_pass, tests.pass_to_pass) == (["t.py::a"], [])
    assert task.metadata["dropped_tests"] == [name]
    (warned,) = task_warnings([task])
    assert warned.endswith(f"which were left out: 1. The first is 'Acme_5f__5f_tool-7', with {name!r}")
    lost = {**REBENCH, "FAIL_TO_PASS": [name], "PASS_TO_PASS": ["t.py::b"]}
    problem = f"line 1: FAIL_TO_PASS: has no name that a test runner reports (got {name!r})"
    with pytest.raises(TaskListError, match=re.escape(problem)):
        mapped(lost)
    _, listed = swe_of({**R2E, "expected_output_json": {"C.x": "PASSED", name: "PASSED"}})
    assert listed.expected == {"C.x": "PASSED"}
    with pytest.raises(TaskListError, match="line 1: expected_output_json: has no name that a test runner"):
        mapped({**R2E, "expected_output_json": {name: "PASSED"}})


@pytest.mark.parametrize("name", REPORTED)
def test_a_name_that_a_runner_may_report_is_kept(name: str) -> None:
    task, tests = swe_of({**REBENCH, "FAIL_TO_PASS": [name]})
    assert tests.fail_to_pass == [name]
    assert "dropped_tests" not in task.metadata
    assert task_warnings([task]) == []


def test_rows_of_smith_plant_their_patch() -> None:
    task, tests = swe_of(SMITH)
    assert tests.repository.patch == PATCH
    assert tests.protected == ["tests/test_b.py"]
    assert task.solution is not None
    assert "--reverse" in str(task.solution[0].arguments["command"])


def test_rows_of_r2e_list_every_result() -> None:
    task, tests = swe_of(R2E)
    assert task.id == "1"
    assert tests.expected == {"C.x": "PASSED", "C.y": "FAILED"}
    assert "/r2e_tests" in tests.repository.hidden


def test_a_repository_of_our_own_stands_in_a_column() -> None:
    repository = {"path": "work/repo", "archive": "eA==", "unpack": "work"}
    kept, _ = swe_of({**REBENCH, "image": "acme/own:1", "repository": repository})
    assert kept.sandbox.image == "docker://acme/own:1"
    task, tests = swe_of({**REBENCH, "image": "", "repository": repository})
    assert tests.repository.archive == "eA=="
    assert "\ncd work/repo\n" not in tests.script  # The script begins in the repository's folder.
    assert "conda" not in tests.script
    assert task.sandbox.image is None


NONE = {"FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**VERSION_5, **NONE}, "FAIL_TO_PASS: must not be empty: a patch that changes nothing"),
        (
            {**VERSION_5, "FAIL_TO_PASS": "[]"},
            "FAIL_TO_PASS: must not be empty: a patch that changes nothing",
        ),
        ({**REBENCH, **NONE}, "FAIL_TO_PASS: must not be empty: a patch that changes nothing"),
        ({**REBENCH, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: must not be empty: a patch that changes nothing"),
        ({**SMITH, **NONE}, "FAIL_TO_PASS: must not be empty: a patch that changes nothing"),
        ({**SMITH, "FAIL_TO_PASS": None, "PASS_TO_PASS": ["t.py::y"]}, "FAIL_TO_PASS: must not be empty"),
        ({**R2E, "expected_output_json": "{}"}, "expected_output_json: must not be empty"),
        ({**R2E, "expected_output_json": {"a": 1}}, "expected_output_json: must be an object of texts"),
        ({**R2E, "repo_name": "tornado"}, "repo_name: has test output that no parser"),
        (CLASSIC, r"eval_script: is missing: rows from before SWE-bench 5 need tasks\.specs"),
        (ROW, "eval_script: is missing, and no other column tells the data set"),
        ({**VERSION_5, "log_parser": "parse_log_other"}, "log_parser: no such log parser; known are: cargo,"),
        ({**VERSION_5, "eval_type": "x"}, "eval_type: must be pass_and_fail or fail_only"),
        ({**VERSION_5, "FAIL_TO_PASS": ["a", 1]}, r"FAIL_TO_PASS\[1\]: must be a text"),
        ({**VERSION_5, "PASS_TO_PASS": [None]}, r"PASS_TO_PASS\[0\]: must be a text"),
        ({**REBENCH_2, "image_name": None}, "image_name: is missing"),
        ({**REBENCH, "install_config": {"a": None}}, "eval_script: is missing: rows from before"),
        ({**VERSION_5, "FAIL_TO_PASS": "a b"}, "FAIL_TO_PASS: is a text that is not JSON"),
        ({**VERSION_5, "problem_statement": ""}, "problem_statement: is missing"),
        ({**REBENCH, "install_config": {"test_cmd": []}}, "install_config.test_cmd: must not be empty"),
        (
            {**REBENCH, "repository": {"path": "r", "archive": "", "source": "x"}},
            "swe.repository: .*at most one",
        ),
    ],
)
def test_a_refused_row_is_named_by_number_and_field(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"^line 2: {problem}"):
        mapped(VERSION_5, row)


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"repo": "other/tool"}, "repo: has no entry"), ({"version": "9"}, "version: has no entry")],
)
def test_a_row_that_specs_do_not_know(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TaskListError, match=f"line 1: {problem}"):
        mapped({**CLASSIC, **change}, specs=SPECS)


def test_specs_that_are_none() -> None:
    with pytest.raises(TaskListError, match=r"specs\.repos: is missing"):
        mapped(CLASSIC, specs={})
    with pytest.raises(TaskListError, match=r"specs\.repos\.a\.log_parser: is missing"):
        mapped(CLASSIC, specs={"repos": {"a": {"versions": {}}}})
    with pytest.raises(TaskListError, match="specs: this format takes none"):
        parse_lines(["{}"], TaskSource(url="x"), specs=SPECS)
    for text in ("[]", "{", "[" * 100_000):
        with pytest.raises(TaskListError, match="specs: "):
            parse_specs(text)
    with pytest.raises(ValueError, match="'specs' goes with 'url'"):
        TaskSource.model_validate({"inline": [{"id": "a", "prompt": "?"}], "specs": "x"})
