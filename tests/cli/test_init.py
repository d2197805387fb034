"""`rollyard init` makes a folder that works, and the page about it is true."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from rollyard.commands.first import TEMPLATE_NAME, template
from rollyard.main import main
from rollyard_crds import Task, parse
from rollyard_pipeline.agents.shipped import SingleTurnAgent
from rollyard_testing.checkout import ROOT

PAGE = (ROOT / "docs/first-task.md").read_text()
FILES = {"README.md", "job.yaml", "rewards.py", "tasks.jsonl", "train.py"}


def tasks() -> dict[str, dict[str, object]]:
    """Return the tasks of the template by their ids."""
    lines = (template() / "tasks.jsonl").read_text().splitlines()
    return {task["id"]: task for task in map(json.loads, lines)}


def test_the_folder_has_its_name_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sums"
    assert main(["init", str(folder)]) == 0
    assert f"cd {folder} && rollyard try job.yaml" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == FILES
    assert os.listdir(tmp_path) == ["sums"]
    assert yaml.safe_load((folder / "job.yaml").read_text())["metadata"]["name"] == "sums"
    assert "rollyard view sums --failed" in (folder / "README.md").read_text()
    assert not [path for path in folder.iterdir() if TEMPLATE_NAME in path.read_text()]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "sums").mkdir()
    assert main(["init", str(tmp_path / "sums")]) == 0
    assert {path.name for path in (tmp_path / "sums").iterdir()} == FILES


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Sums", "'Sums' cannot be the name of a job"),
        ("my_sums", "'my_sums' cannot be the name of a job"),
        ("-sums", "No such option"),
        ("a" * 41, "at most 40"),
        ("..", "'..' cannot be the name of a job"),
        ("", "'' cannot be the name of a job"),
        ("full", "full is there already; choose another name"),
        ("file", "file is there already; choose another name"),
        ("link", "link is there already; choose another name"),
        ("dangling", "dangling is there already; choose another name"),
        ("none/sums", "there is no folder none"),
        ("file/sums", "there is no folder file"),
    ],
)
def test_what_is_refused_changes_nothing(
    name: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    assert main(["init", name]) == 2
    assert problem in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_half_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def failing(path: Path, text: str) -> int:
        if path.name == "train.py":
            raise OSError(28, "No space left on device", str(path))
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", failing)
    assert main(["init", str(tmp_path / "sums")]) == 1
    assert os.listdir(tmp_path) == []


def test_the_tasks_and_the_job_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "sums")]) == 0
    job, plugin = tmp_path / "sums/job.yaml", tmp_path / "sums/rewards.py"
    assert main(["validate", "-f", str(job), "--plugin", str(plugin)]) == 0
    assert "(4 tasks, 4 samples each)" in capsys.readouterr().out


def test_the_page_shows_a_task_of_the_folder() -> None:
    (shown,) = re.findall(r"<!-- task: (\w+) -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(shown[1]) == tasks()[shown[0]]


def test_the_page_shows_valid_tasks() -> None:
    blocks = re.findall(r"<!-- valid: task -->\n```json\n(.*?)```", PAGE, re.DOTALL)
    assert [Task.model_validate_json(block).id for block in blocks] == ["polite"]


def test_the_page_has_each_tool_with_its_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", PAGE, re.MULTILINE)
    shown = {tool: re.findall(r"\w+", arguments) for tool, arguments in rows}
    installed = {
        point.name: list(point.load().parameters["properties"])
        for point in entry_points(group="rollyard.tools")
        if point.value.startswith("rollyard_pipeline.")
    }
    assert shown == installed


def test_each_block_of_the_page_is_checked_by_a_test() -> None:
    """Blocks without a language are run by test_first_task.py. The others say with what they are compared."""
    marks = re.findall(r"(?:<!-- (\w+): [^\n]* -->\n)?```(\w*)\n.*?```", PAGE, re.DOTALL)
    wanted = {"text": "output", "json": ("task", "valid"), "yaml": "from", "python": ("from", "plugin")}
    assert [mark for mark in marks if mark[1] and mark[0] not in wanted[mark[1]]] == []


def test_a_single_turn_offers_no_tool() -> None:
    """The page says that nothing is submitted there, so that a test script sees no answer."""
    assert SingleTurnAgent.uses_tools is False


def test_the_manifest_is_one_job() -> None:
    parse(yaml.safe_load((template() / "job.yaml").read_text()))
