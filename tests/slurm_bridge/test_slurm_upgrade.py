"""A bridge that is started with a new version finds what an earlier one has left: profile, jobs, submissions.

The files in `data/submissions` were written by the version before the records had a schema.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_slurm.bridge import Bridge
from rollyard_slurm.errors import SlurmError
from rollyard_slurm.options import BridgeOptions, reconcile_profile
from rollyard_slurm.profile import SiteProfile, load
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.records import Records
from rollyard_slurm.submissions.submission import Submission
from rollyard_testing.slurm_bridge.bench import Bench
from rollyard_testing.slurm_bridge.fakeslurm import FakeSlurm

EARLIER = Path(__file__).parent / "data" / "submissions"


async def test_a_profile_of_an_earlier_version_may_ask_for_salloc(tmp_path: Path) -> None:
    """It is accepted, also beside slurmrestd, and a line says that it has no effect."""
    path = tmp_path / "profile.yaml"
    path.write_text("rest: {url: 'unix:/s'}\nworkers: {start: salloc}\n")
    assert load(path).asks_for_salloc
    path.write_text("start: salloc\n")
    assert not load(path, {"start": "sbatch"}).asks_for_salloc
    said: list[str] = []
    options = BridgeOptions(tmp_path / "h", listen="192.0.2.1", profile=load(path))
    bridge = Bridge(
        options, lambda url, token, tls: pytest.fail("it starts"), say=said.append, calls=FakeSlurm()
    )
    with pytest.raises(SlurmError, match=r"192\.0\.2\.1: is no address of this host"):
        await bridge.run()
    assert said == ["`start: salloc` has no effect any more: every job is submitted by sbatch"]


@pytest.mark.parametrize(
    ("profile", "made_of"),
    [
        ({}, "458396ecbb658910"),
        ({"partition": "debug", "workers": {"memory": "4G"}, "start": "salloc"}, "2ea6d069fc505f7e"),
    ],
)
def test_workers_of_an_earlier_version_are_not_replaced(profile: dict[str, Any], made_of: str) -> None:
    """What makes a bridge replace its jobs is the same for the same profile as in that version."""
    site = Site(
        Path("/shared/h"), "abcd1234", "http://head:1", SiteProfile.model_validate(profile), python="py"
    )
    assert reconcile_profile(site).made_of == made_of


def test_the_comment_of_a_job_is_as_it_was(earlier: list[Submission]) -> None:
    comment = (
        "rollyard,instance=abcd1234,launch=aaaaaaaaaaaa,kind=stage-worker,owner=rolloutjob/default/qs,"
        "uid=12345678-aaaa,workload=qs-worker-0,hash=be9103a4bce0a3db,restarts=2"
    )
    (workload,) = {one.workload for one in earlier if one.launch == "aaaaaaaaaaaa"}
    assert SlurmJobIdentity.of(workload, "abcd1234", "aaaaaaaaaaaa", 2).comment == comment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return records that an earlier version wrote."""
    return shutil.copytree(EARLIER, tmp_path / "submissions")


@pytest.fixture
def earlier(folder: Path) -> list[Submission]:
    return Records(folder).load()


def test_records_of_an_earlier_version_are_read(earlier: list[Submission]) -> None:
    worker, backend, unsure, ended = earlier
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


def test_records_from_before_they_said_how_the_last_job_ended_are_read(folder: Path) -> None:
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        del document["lastEnd"]
        path.write_text(json.dumps(document))
    assert [one.last_end for one in Records(folder).load()] == ["", "", "", ""]


def test_what_is_read_and_saved_again_is_the_same(tmp_path: Path, earlier: list[Submission]) -> None:
    """An earlier version can be started again on the home, too."""
    records = Records(tmp_path / "again")
    assert records.load() == []
    for one in earlier:
        records.save(one)
    for path in EARLIER.iterdir():
        before, after = (json.loads(one.read_text()) for one in (path, tmp_path / "again" / path.name))
        for document, name in ((before, "allocated"), (before, "launcher"), (before["workload"], "sandbox")):
            del document[name]  # This version has no use for it.
        # Earlier versions ignore these fields.
        added = [after.pop(name) for name in ("nodes", "queuedAt", "ready", "restartCount")]
        assert added == ["", "", "", None]
        assert after["ending"] is None or after["ending"].pop("processEnded")
        assert after == before


@pytest.mark.parametrize(
    "change",
    [
        {"workload": None},
        {"submittedAt": None},
        {"submittedAt": "soon"},
        {"job": "x"},
        {"ending": {"code": 1}},
    ],
)
def test_a_record_that_cannot_be_read_is_put_aside(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "aaaaaaaaaaaa.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [one.launch for one in Records(folder).load()] == ["bbbbbbbbbbbb", "cccccccccccc", "dddddddddddd"]
    assert path.with_suffix(".unreadable").exists()


async def test_a_worker_that_salloc_began_is_found_again_and_cancelled_in_time(tmp_path: Path) -> None:
    """Such a job has no batch script that could receive the signal to drain."""
    async with httpx.AsyncClient(trust_env=False) as http:
        bench = Bench(tmp_path / "h", http)
        record = json.loads((EARLIER / "aaaaaaaaaaaa.json").read_text()) | {
            "stopBy": None,
            "drainingSince": None,
        }
        (bench.site.home / "submissions" / "aaaaaaaaaaaa.json").write_text(json.dumps(record))
        bench.slurm.last = 100
        bench.begin()
        who = SlurmJobIdentity.of(bench.fleet.jobs[0].workload, "abcd1234", "aaaaaaaaaaaa", 2)
        assert bench.slurm.take(f"#SBATCH --comment={who.comment}\n") == 101
        bench.slurm.run(101)
        await bench.turns(60)
        assert bench.slurm.signals[0] == (101, "USR1"), "nobody wants it"
        assert bench.slurm.cancelled == [101]
        assert bench.fleet.jobs == []
        await bench.fleet.close()
