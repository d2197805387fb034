"""A bridge that is started again finds the submissions that the one before has left."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.submissions.home_submissions import load_records, save_record
from rollyard_slurm.submissions.submission import Submission

RECORDED = Path(__file__).parent / "data" / "submissions"


def test_the_comment_of_a_job_names_it(left: list[Submission]) -> None:
    comment = (
        "rollyard,instance=abcd1234,launch=aaaaaaaaaaaa,kind=stage-worker,owner=rolloutjob/default/qs,"
        "uid=12345678-aaaa,workload=qs-worker-0,hash=be9103a4bce0a3db,restarts=2"
    )
    (workload,) = {one.workload for one in left if one.launch == "aaaaaaaaaaaa"}
    assert SlurmJobIdentity.of(workload, "abcd1234", "aaaaaaaaaaaa", 2).comment == comment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the records of four submissions."""
    return shutil.copytree(RECORDED, tmp_path / "submissions")


@pytest.fixture
def left(folder: Path) -> list[Submission]:
    return load_records(folder)


def test_records_are_read(left: list[Submission]) -> None:
    worker, backend, unsure, ended = left
    began = datetime(2026, 11, 2, 8, 30, 15, 250_000, tzinfo=UTC)
    assert (worker.launch, worker.job, worker.restarts) == ("aaaaaaaaaaaa", 101, 2)
    assert worker.last_end == "exited with 3"
    assert worker.submitted_at == began
    assert [
        (when - began).total_seconds()
        for when in (worker.started_at, worker.draining_since, worker.stop_by)
        if when is not None
    ] == [3.0, 240.0, 300.0]
    assert worker.stopping
    assert worker.workload.concurrency == (("init", 16), ("run", 64))
    assert worker.workload.owner.uid == "12345678-aaaa"
    assert [one.workload.spec_hash for one in (worker, backend)] == ["be9103a4bce0a3db", "757dc274b924640b"]
    assert backend.retired
    assert (backend.url, backend.health.ready) == ("http://cn1:8000", True), "it counts as serving"
    assert backend.workload.env == (("A", "1 2"),)
    assert (unsure.job, unsure.living) == (None, True)
    assert unsure.unsure_until is not None
    assert ended.ending is not None
    assert (ended.ending.code, ended.living) == (-9, False)
    assert ended.ended_at == began.replace(hour=9, minute=30)


def test_what_is_read_and_saved_again_is_the_same(tmp_path: Path, left: list[Submission]) -> None:
    folder = tmp_path / "again"
    assert load_records(folder) == []
    for one in left:
        save_record(folder, one)
    for path in RECORDED.iterdir():
        assert json.loads((folder / path.name).read_text()) == json.loads(path.read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"workload": None},
        {"submitted_at": None},
        {"submitted_at": "soon"},
        {"job": "x"},
        {"ending": {"code": 1}},
    ],
)
def test_a_record_that_cannot_be_read_is_put_aside(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "aaaaaaaaaaaa.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [one.launch for one in load_records(folder)] == ["bbbbbbbbbbbb", "cccccccccccc", "dddddddddddd"]
    assert path.with_suffix(".unreadable").exists()
