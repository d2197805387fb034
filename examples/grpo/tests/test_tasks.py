"""Training tasks are endless, repeatable, and share no file with the held-out tasks."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from tinygrpo.errors import TrainingError
from tinygrpo.tasks import OwnJob, TaskRecord, held_out_tasks, training_tasks


def texts(tasks: list[TaskRecord]) -> set[str]:
    return {text for task in tasks for text in task["sandbox"]["files"].values() if text}


def test_held_out_tasks_share_no_file_with_training_tasks() -> None:
    training = [task for seed in range(3) for task in islice(training_tasks(seed), 500)]
    assert not texts(training) & texts(held_out_tasks())
    assert not {str(task["sandbox"]["files"]) for task in training} & {
        str(task["sandbox"]["files"]) for task in held_out_tasks()
    }


def test_equal_arguments_give_equal_tasks_and_others_others() -> None:
    first = list(islice(training_tasks(0), 40))
    assert list(islice(training_tasks(0), 40)) == first
    assert list(islice(training_tasks(0, start=10), 30)) == first[10:]
    assert [task["prompt"] for task in islice(training_tasks(1), 40)] != [task["prompt"] for task in first]
    assert len({task["id"] for task in first}) == 40


def test_held_out_tasks_come_in_turn() -> None:
    assert len(held_out_tasks()) == 64
    assert len({task["metadata"]["template"] for task in held_out_tasks(14)}) == 14
    with pytest.raises(TrainingError, match="64 held-out tasks"):
        held_out_tasks(65)


def test_the_tasks_of_ones_own_job_come_in_turn_under_new_ids(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"id": name, "prompt": "?"}) for name in "ab"))
    (tmp_path / "job.yaml").write_text("spec: {tasks: {url: tasks.jsonl}, handler: math}")
    own = OwnJob.read(tmp_path / "job.yaml")
    assert own.spec["handler"] == "math"
    first = list(islice(own.supply(), 5))
    assert [task["id"] for task in first] == ["000000-a", "000001-b", "000002-a", "000003-b", "000004-a"]
    assert list(islice(own.supply(3), 2)) == first[3:]


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("- a", "must be the manifest of a job"),
        ("spec: {handler: math}", "KeyError: 'tasks'"),
        ("spec: {tasks: {url: nowhere.jsonl}}", "FileNotFoundError"),
        ("spec: {tasks: {inline: [{prompt: a}]}}", "KeyError: 'id'"),
        ("spec: {tasks: {inline: []}}", "no task to train on"),
        ("{", "ParserError"),
    ],
)
def test_a_job_without_tasks_that_can_be_read_is_refused(manifest: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(manifest)
    with pytest.raises(TrainingError, match=problem):
        OwnJob.read(tmp_path / "job.yaml")
