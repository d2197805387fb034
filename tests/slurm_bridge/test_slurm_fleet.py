"""The driver pass by pass, over a Slurm in memory: nothing is submitted twice, nothing is forgotten."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_crds import BackendPoolStatus
from rollyard_drivers.reconcile.plan import Launch, Owner, Plan, Stop, Workload
from rollyard_slurm.bridge import prune_logs
from rollyard_slurm.errors import SlurmError, SlurmUnavailable, SubmitRefused
from rollyard_slurm.options import reconcile_profile
from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.home_submissions import AVOID_SECONDS
from rollyard_slurm.submissions.polling import ENDS_AT_ONCE
from rollyard_slurm.submissions.stopping import CANCEL_AGAIN_SECONDS
from rollyard_slurm.submissions.submitting import SUBMITTED_AT_ONCE, SUCCESSOR_AGAIN_SECONDS, UNSURE_SECONDS
from rollyard_testing.slurm_bridge.bench import Bench, job

BACKEND = Workload("p-backend-0", "backend", Owner("BackendPool", "default", "p", "u"), model="m")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@pytest.fixture
def bench(tmp_path: Path, http: httpx.AsyncClient) -> Bench:
    return Bench(tmp_path / "h", http, job())


async def test_one_worker_is_submitted_once_and_becomes_running(bench: Bench) -> None:
    await bench.turns(4)
    assert bench.slurm.submissions == 1
    assert "Slurm job 101 is pending: jobs of higher priority are ahead (Priority)" in bench.said_of()
    bench.slurm.run(101)
    await bench.turns()
    assert bench.said_of("Running", "status") == "True"
    assert bench.slurm.submissions == 1
    (file,) = bench.site.tokens.iterdir()
    assert file.read_text() == "secret"


async def test_nothing_is_done_before_slurm_has_answered_once(bench: Bench) -> None:
    bench.slurm.away = "squeue did not answer within 20 s"
    await bench.turns()
    assert bench.slurm.submissions == 0
    assert "not submitted yet: squeue did not answer within 20 s" in bench.said_of()
    bench.slurm.away = ""
    await bench.turns()
    assert bench.slurm.submissions == 1


async def test_a_new_bridge_goes_on_with_the_same_jobs(bench: Bench) -> None:
    await bench.until_running()
    bench.begin()
    await bench.turns()
    assert bench.slurm.submissions == 1
    assert bench.said_of("Running", "status") == "True"
    bench.slurm.end(101, "FAILED", status=3)
    bench.begin()
    await bench.turns(1)
    assert "exited with 3" in bench.said_of("Degraded"), "it ended while no bridge ran"


async def test_a_new_bridge_says_nothing_of_its_jobs_before_slurm_has(bench: Bench) -> None:
    await bench.until_running()
    bench.begin()
    bench.slurm.away = "squeue did not answer within 20 s"
    await bench.turns()
    assert bench.said_of("Running", "status") == "True", "as it was"
    bench.slurm.away = ""
    await bench.turns()
    assert bench.slurm.submissions == 1


async def test_a_bridge_killed_between_sbatch_and_its_note_finds_the_job(bench: Bench) -> None:
    bench.slurm.unsure = "taken"
    await bench.turns(1)
    bench.slurm.unsure = ""
    bench.begin()
    await bench.turns(5)
    assert bench.slurm.submissions == 1
    assert list(bench.slurm.queued) == [101]


async def test_an_sbatch_that_hangs_is_not_repeated_while_its_job_may_come(bench: Bench) -> None:
    bench.slurm.unsure = "lost"
    await bench.turns(4)
    assert bench.slurm.submissions == 1
    bench.slurm.unsure = ""
    await bench.turns(4, seconds=UNSURE_SECONDS / 2)
    assert bench.slurm.submissions == 2
    assert list(bench.slurm.queued) == [101]


async def test_a_job_that_comes_too_late_is_cancelled(bench: Bench) -> None:
    bench.slurm.unsure = "taken"
    await bench.turns(1)
    late = bench.slurm.queued.pop(101)
    bench.slurm.unsure = ""
    await bench.turns(4, seconds=UNSURE_SECONDS / 2)
    assert list(bench.slurm.queued) == [102]
    bench.slurm.queued[101] = late
    await bench.turns()
    assert bench.slurm.cancelled == [101]
    assert list(bench.slurm.queued) == [102]


async def test_a_sites_limit_is_waited_out(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=8))
    bench.slurm.refuse, bench.slurm.limit = "QOSMaxSubmitJobPerUserLimit", True
    await bench.turns(10)
    assert bench.slurm.submissions <= 4, "one try for all, and not in every turn"
    assert "QOSMaxSubmitJobPerUserLimit" in bench.said_of()
    assert bench.said_of("Degraded", "status") == "False", "a limit is no failure"
    bench.slurm.refuse = ""
    await bench.turns(40)
    assert len(bench.slurm.queued) == 8
    assert len({one.name for one in bench.slurm.queued.values()}) == 8


async def test_an_impossible_request_is_told_and_tried_again_seldom(bench: Bench) -> None:
    bench.slurm.refuse = "invalid partition specified: nosuch"
    await bench.turns(10)
    assert bench.slurm.submissions == 1
    assert "sbatch: invalid partition specified: nosuch" in bench.said_of("Degraded")
    assert bench.said_of("Degraded", "reason") == "WorkersBlocked"
    bench.slurm.refuse = ""
    await bench.turns(40)
    assert list(bench.slurm.queued) == [101], "somebody has made the partition"


async def test_a_pending_reason_that_time_does_not_mend(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.change(101, reason="PartitionConfig")
    await bench.turns()
    assert bench.said_of("Degraded", "reason") == "WorkersBlocked"
    assert "no node of the partition can serve the request" in bench.said_of("Degraded")


async def test_while_slurm_is_away_everything_counts_as_last_seen(bench: Bench) -> None:
    await bench.until_running()
    bench.slurm.away = "squeue: Unable to contact slurm controller (connect failure)"
    bench.slurm.queued.clear()
    await bench.turns(30)
    assert bench.said_of("Running", "status") == "True"
    assert bench.slurm.submissions == 1
    assert len([line for line in bench.said if "does not answer" in line]) == 1, "told once"


async def test_a_failure_is_restarted_with_growing_pauses(bench: Bench) -> None:
    await bench.turns()
    for number, pause in ((101, 2), (102, 4), (103, 8)):
        bench.slurm.run(number)
        await bench.turns(1)
        bench.slurm.end(number, "FAILED", status=1)
        await bench.turns(1)
        before = bench.slurm.submissions
        await bench.turns(pause - 1)
        assert bench.slurm.submissions == before, "not yet"
        await bench.turns(3)
        assert bench.slurm.submissions == before + 1


@pytest.mark.parametrize("state", ["TIMEOUT", "PREEMPTED"])
async def test_a_time_limit_is_no_failure(bench: Bench, state: str) -> None:
    await bench.until_running()
    bench.slurm.end(101, state, signal=15)
    await bench.turns(2)
    assert list(bench.slurm.queued) == [102], "at once"
    assert "restarts=0" in bench.slurm.queued[102].comment
    assert bench.said_of("Degraded", "status") == "False"


async def test_scancel_counts_as_an_exit(bench: Bench) -> None:
    await bench.until_running()
    bench.slurm.end(101, "CANCELLED", signal=15)
    await bench.turns(1)
    assert "was cancelled" in bench.said_of("Degraded")
    assert list(bench.slurm.queued) == []
    await bench.turns(4)
    assert "restarts=1" in bench.slurm.queued[102].comment


async def test_one_that_is_stopped_to_be_replaced_is_counted_as_restarted(bench: Bench) -> None:
    await bench.until_running()
    (owner,) = bench.fleet.owners()
    (seen,) = bench.fleet.observed(owner)
    workload = bench.fleet.jobs[0].workload
    bench.fleet.stop(Stop(seen.name, 0.0, Launch(workload, 1, "did not answer")))
    await bench.turns(8)
    assert "restarts=1" in bench.slurm.queued[102].comment
    bench.slurm.run(102)
    await bench.turns()
    assert "was restarted once; the one before did not answer" in bench.said_of("Degraded")


async def test_how_the_one_before_ended_is_told_after_a_restart_of_the_bridge_too(bench: Bench) -> None:
    await bench.until_running()
    bench.slurm.end(101, "OUT_OF_MEMORY", signal=9)
    await bench.turns(6)
    bench.slurm.run(102)
    await bench.turns()
    told = "was restarted once; the one before was killed by signal 9 (Slurm job 101 ran out of memory"
    assert told in bench.said_of("Degraded")
    bench.begin()
    await bench.turns()
    assert told in bench.said_of("Degraded")
    bench.slurm.run(102, left=500.0)
    await bench.turns(2)
    bench.slurm.run(103)
    await bench.turns(2)
    assert told in bench.said_of("Degraded"), "a successor continues with it"


async def test_what_a_worker_that_runs_says_of_its_node(bench: Bench) -> None:
    await bench.until_running()
    (worker,) = {one.workload.name for one in bench.fleet.jobs}
    bench.site.troubles.mkdir()
    (bench.site.troubles / f"{worker}-101").write_text(
        "node cn1 starts no sandboxes: No space left on device"
    )
    await bench.turns()
    assert bench.said_of("Degraded", "reason") == "WorkersImpaired"
    assert bench.said_of("Degraded") == f"{worker}: node cn1 starts no sandboxes: No space left on device"
    assert bench.said_of("Running", "status") == "True", "what it holds continues"
    (bench.site.troubles / f"{worker}-101").unlink()
    await bench.turns()
    assert bench.said_of("Degraded", "status") == "False"
    (bench.site.troubles / f"{worker}-101").write_text("killed before it could remove it")
    bench.slurm.end(101, "TIMEOUT", signal=15)
    await bench.turns(2)
    assert list(bench.site.troubles.iterdir()) == []
    assert bench.said_of("Degraded", "status") == "False"


async def test_a_node_that_a_worker_cannot_use_is_left_alone_while_others_will_do(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.run(101)
    await bench.turns(1)
    bench.slurm.end(101, "FAILED", status=73)
    await bench.turns(5)
    assert "#SBATCH --exclude=cn1\n" in bench.slurm.scripts[102]
    bench.slurm.run(102)
    bench.slurm.change(102, nodes="cn2")
    await bench.turns(1)
    bench.slurm.end(102, "FAILED", status=73)
    await bench.turns(8)
    assert "#SBATCH --exclude=cn1,cn2\n" in bench.slurm.scripts[103], "not to and fro between the two"
    bench.slurm.end(103, "FAILED", status=1)
    bench.slurm.refuse = "Requested node configuration is not available"
    await bench.turns(12)
    bench.slurm.refuse = ""
    await bench.turns(40)
    (number,) = bench.slurm.queued
    assert "--exclude" not in bench.slurm.scripts[number], "rather those again than none"


async def test_a_node_is_tried_again_later(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.run(101)
    await bench.turns(1)
    bench.slurm.end(101, "FAILED", status=73)
    await bench.turns(5)
    bench.slurm.run(102)
    await bench.turns(3, seconds=AVOID_SECONDS / 2)
    bench.slurm.end(102, "FAILED", status=1)
    await bench.turns(5)
    assert "--exclude" not in bench.slurm.scripts[103]


async def test_a_job_that_slurm_forgot_is_started_again(bench: Bench) -> None:
    await bench.until_running()
    del bench.slurm.queued[101]
    await bench.turns(1)
    assert "Slurm no longer knows how it ended" in bench.said_of("Degraded")
    await bench.turns(5)
    assert list(bench.slurm.queued) == [102]


async def test_a_requeue_is_slurms_own_matter(bench: Bench) -> None:
    await bench.until_running()
    bench.slurm.change(101, state="PENDING", reason="BeginTime")
    await bench.turns(10)
    assert bench.slurm.submissions == 1
    assert "Slurm starts it again in a moment" in bench.said_of()
    assert bench.said_of("Degraded", "status") == "False"


async def replaced(bench: Bench) -> None:
    """Let job 101 run until it is near its time limit, so that job 102, its successor, is queued."""
    await bench.until_running()
    bench.slurm.run(101, left=500.0)
    await bench.turns(2)


async def test_a_successor_queues_ahead_and_takes_over(bench: Bench) -> None:
    await replaced(bench)
    await bench.turns(3)
    assert list(bench.slurm.queued) == [101, 102], "one successor, not one for each turn"
    assert bench.said_of("Running", "status") == "True", "the first one works on"
    assert bench.slurm.signals == []
    bench.slurm.run(102)
    await bench.turns(3)
    assert bench.slurm.signals == [(101, "USR1")], "once the successor runs, the first winds up"
    bench.begin()
    await bench.turns(3)
    assert bench.slurm.submissions == 2, "a new bridge knows who is whose successor"
    bench.slurm.end(101, "COMPLETED")
    await bench.turns(5)
    assert list(bench.slurm.queued) == [102]
    assert bench.said_of("Running", "status") == "True"
    assert bench.said_of("Degraded", "status") == "False"


async def test_a_predecessor_that_ends_first_hands_its_place_on(bench: Bench) -> None:
    await replaced(bench)
    bench.slurm.end(101, "TIMEOUT", signal=15)
    await bench.turns(5)
    assert list(bench.slurm.queued) == [102]
    assert "Slurm job 102 is pending" in bench.said_of()


async def test_a_finished_job_leaves_nothing(bench: Bench) -> None:
    await replaced(bench)
    bench.store.listed.clear()
    await bench.turns(1)
    assert bench.slurm.cancelled == [102], "a pending successor at once"
    assert bench.slurm.signals == [(101, "USR1")]
    await bench.turns(16)
    assert (101, "USR2") in bench.slurm.signals, "then it hands over what it holds"
    await bench.turns(10)
    assert bench.slurm.cancelled[-1] == 101, "and at last it is cancelled"
    await bench.turns(1)
    assert bench.slurm.queued == {}
    assert bench.fleet.owners() == set()
    assert list((bench.site.home / "submissions").iterdir()) == []


async def test_other_jobs_of_the_user_are_left_alone(bench: Bench) -> None:
    await bench.turns()
    mine = bench.slurm.queued[101]
    other = mine.comment.replace("instance=abcd1234", "instance=ffffffff")
    bench.slurm.queued[7] = type(mine)(7, "RUNNING", "None", "cn1", 1.0, 1.0, 1.0, "theirs", "", "")
    bench.slurm.queued[8] = type(mine)(8, "RUNNING", "None", "cn1", 1.0, 1.0, 1.0, mine.name, other, "")
    bench.store.listed.clear()
    await bench.turns(5)
    assert bench.slurm.cancelled == [101]
    assert {7, 8} <= bench.slurm.queued.keys()


async def test_a_changed_site_replaces_what_runs(bench: Bench) -> None:
    await bench.until_running()
    bench.site = Site(
        bench.site.home, "abcd1234", "http://other:2", bench.site.profile, python=bench.site.python
    )
    bench.begin()
    await bench.turns(2)
    assert bench.slurm.signals == [(101, "USR1")]
    bench.slurm.end(101, "COMPLETED")
    await bench.turns(4)
    assert "--url http://other:2" in bench.slurm.scripts[102]


async def test_the_token_of_a_job_stays_while_one_of_its_workers_does(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=2), job("other"))
    bench.store.listed[1].metadata.uid = "87654321-bbbb"
    await bench.turns()
    bench.slurm.run_all()
    await bench.turns()
    tokens = {path.name for path in bench.site.tokens.iterdir()}
    assert tokens == {"default.qs.12345678", "default.other.87654321"}
    two, other = bench.store.listed
    two.spec.stages.init.replicas = two.spec.stages.run.replicas = two.spec.stages.eval.replicas = 1
    await bench.turns(60)
    assert len(bench.slurm.queued) == 2
    assert {path.name for path in bench.site.tokens.iterdir()} == tokens
    bench.store.listed = [other]
    await bench.turns(60)
    assert [path.name for path in bench.site.tokens.iterdir()] == ["default.other.87654321"]


async def test_a_stop_is_remembered_by_the_next_bridge(bench: Bench) -> None:
    await bench.until_running()
    (owner,) = bench.fleet.owners()
    (seen,) = bench.fleet.observed(owner)
    bench.fleet.stop(Stop(seen.name, 60.0))
    (stopping,) = bench.fleet.jobs
    bench.begin()
    (again,) = bench.fleet.jobs
    assert again.stopping
    assert again.stop_by == stopping.stop_by


async def test_a_backend_that_takes_no_rollouts_is_remembered_with_its_time(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    """Nothing is noted about the others, nor about those of other pools. It may take rollouts again later."""
    bench = Bench(tmp_path / "h", http)
    first, second = (Owner("BackendPool", "default", name, name) for name in ("p", "q"))
    names = {owner: [f"{owner.name}-{index}" for index in range(2)] for owner in (first, second)}
    await bench.turns()
    for owner, both in names.items():
        launch = tuple(Launch(Workload(name, "backend", owner, model="m")) for name in both)
        await bench.fleet.carry_out(owner, Plan(BackendPoolStatus(), launch=launch))

    def drains() -> dict[str, datetime]:
        found = [one for owner in names for one in bench.fleet.observed(owner)]
        return {one.name: one.draining_since for one in found if one.draining_since is not None}

    async def drain(owner: Owner, *which: str) -> None:
        await bench.fleet.carry_out(owner, Plan(BackendPoolStatus(), drain=frozenset(which)))

    await drain(first, "p-1", "q-1")
    assert drains().keys() == {"p-1"}
    before = drains()
    await drain(second, "q-0")
    await drain(first, "p-0", "p-1")
    assert drains()["p-1"] == before["p-1"], "since the first time"
    bench.begin()
    assert drains().keys() == {"p-0", "p-1", "q-0"}
    assert drains()["p-1"] == before["p-1"]
    await drain(first, "p-0")
    bench.begin()
    assert drains().keys() == {"p-0", "q-0"}
    await bench.fleet.close()


@pytest.mark.parametrize(
    ("error", "blocked"),
    [
        (SubmitRefused("invalid account", False), True),
        (SubmitRefused("QOSMaxSubmitJobPerUserLimit", True), False),
        (SlurmUnavailable("slurmctld is not there"), False),
        (SlurmError("there is no program 'sbatch' on PATH"), True),
    ],
    ids=repr,
)
async def test_a_job_that_was_not_taken_leaves_no_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: SlurmError, blocked: bool
) -> None:
    """The next bridge would else wait for it to appear in the queue."""

    async def refuse(script: object) -> int:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(bench.slurm, "submit", refuse)
        await bench.turns(1)
        (owner,) = bench.fleet.owners()
        (seen,) = bench.fleet.observed(owner)
        assert (seen.blocked, str(error) in seen.message) == (blocked, True)
    assert list((bench.site.home / "submissions").iterdir()) == []
    bench.begin()
    await bench.turns(2)
    assert list(bench.slurm.queued) == [101]


async def test_many_jobs_are_submitted_and_found_ended_some_at_a_time(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=SUBMITTED_AT_ONCE + 3))
    await bench.turns(1)
    assert bench.slurm.submissions == SUBMITTED_AT_ONCE
    await bench.turns(2)
    assert bench.slurm.submissions == SUBMITTED_AT_ONCE + 3
    bench.slurm.run_all()
    await bench.turns(1)
    for number in list(bench.slurm.queued):
        bench.slurm.end(number, "COMPLETED" if number % 2 else "FAILED", status=number % 2)
    await bench.fleet.poll(bench.now)
    (owner,) = bench.fleet.owners()
    assert [one.state for one in bench.fleet.observed(owner)].count("exited") == ENDS_AT_ONCE
    await bench.turns(3)
    assert len(bench.store.deaths) == len(set(bench.store.deaths)) == SUBMITTED_AT_ONCE + 3


async def test_a_job_of_this_home_that_nothing_wants_is_cancelled_once(bench: Bench) -> None:
    """One that completes is ending anyway."""
    await bench.turns()
    comment = bench.slurm.queued[101].comment
    for number, launch in ((201, "aaaaaaaaaaaa"), (202, "bbbbbbbbbbbb"), (203, "cccccccccccc")):
        other = re.sub("launch=[0-9a-f]+", f"launch={launch}", comment)
        bench.slurm.queued[number] = replace(bench.slurm.queued[101], id=number, comment=other)
    bench.slurm.change(202, state="COMPLETING")
    left = bench.slurm.queued[203]
    await bench.turns()
    bench.slurm.queued[203] = left  # It takes Slurm a while.
    await bench.turns()
    assert bench.slurm.cancelled == [201, 203]


async def test_when_the_bridge_ends_the_workers_end_first_and_the_earlier_limit_holds(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=4))
    await bench.turns()
    await bench.fleet.carry_out(BACKEND.owner, Plan(BackendPoolStatus(), launch=(Launch(BACKEND),)))
    bench.slurm.run_all()
    bench.slurm.end(104, "FAILED", status=1)
    await bench.fleet.poll(bench.now)
    by_job = {one.job: one for one in bench.fleet.jobs}
    assert by_job.keys() == {101, 102, 103, 105}
    bench.fleet.stop(Stop(by_job[101].workload.name, 5.0))
    bench.fleet.stop(Stop(by_job[102].workload.name, 500.0))
    earlier = by_job[101].stop_by
    now = datetime.now(UTC)
    bench.fleet.stop_kind("stage-worker", 60.0, now)
    limit = now + timedelta(seconds=60)
    assert {number: one.stop_by for number, one in by_job.items()} == {
        101: earlier,
        102: limit,
        103: limit,
        105: None,
    }
    assert len(list((bench.site.home / "submissions").iterdir())) == 4, "one that has ended is forgotten"
    assert [one.job for one in bench.fleet.left("backend")] == [105]
    bench.begin()
    assert {one.job: one.stop_by for one in bench.fleet.jobs} == {
        number: one.stop_by for number, one in by_job.items()
    }
    await bench.fleet.close()


async def test_a_job_that_does_not_end_is_cancelled_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    async def ignored(jobs: Sequence[int]) -> None:
        asked.append(list(jobs))

    await bench.turns()
    monkeypatch.setattr(bench.slurm, "cancel", ignored)
    bench.store.listed.clear()
    await bench.turns(5)
    assert asked == [[101]]
    await bench.turns(1, seconds=CANCEL_AGAIN_SECONDS + 1)
    assert asked == [[101], [101]]
    await bench.turns(5)
    assert len(asked) == 2


async def test_only_workers_are_asked_to_hand_over_what_they_hold(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, job())
    await bench.turns()
    await bench.fleet.carry_out(BACKEND.owner, Plan(BackendPoolStatus(), launch=(Launch(BACKEND),)))
    bench.slurm.run_all()
    await bench.fleet.poll(bench.now)
    for kind in ("stage-worker", "backend"):
        bench.fleet.stop_kind(kind, 10.0, bench.now)
    for passed in (1, 2, 5, 6, 8):
        await bench.fleet.act(bench.now + timedelta(seconds=passed))
    assert sorted(bench.slurm.signals) == [(101, "USR1"), (101, "USR2"), (102, "USR1")]
    assert bench.slurm.cancelled == []
    await bench.fleet.act(bench.now + timedelta(seconds=10))
    assert sorted(bench.slurm.cancelled) == [101, 102]
    await bench.fleet.close()


def test_the_newest_logs_and_those_of_jobs_that_run_are_kept(tmp_path: Path) -> None:
    """The names of jobs end with their numbers, which are not in the order of the alphabet."""
    numbers = (9, 10, 100, 7, 11, 99, 12, 101, 6, 13)
    for number in numbers:
        (tmp_path / f"{'abc'[number % 3]}-worker-0-{number}.log").touch()
    living = tmp_path / "c-backend-0-8.log"
    living.touch()
    others = {"bridge.log", "control-plane.log", "a-worker-0-5.txt"}
    for name in others:
        (tmp_path / name).touch()
    assert prune_logs(tmp_path, {living}, kept=3) == 7
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"b-worker-0-100.log", "a-worker-0-99.log", "c-worker-0-101.log", living.name, *others}


def test_all_that_a_script_is_made_from_replaces_jobs_that_run(tmp_path: Path) -> None:
    site = Site(tmp_path, "i", "http://h:1", SiteProfile(), python="py")
    changes: list[dict[str, Any]] = [
        {},
        {"url": "http://h:2"},
        {"sandbox": "bubblewrap"},
        {"sandbox_options": ("--default-image", "x")},
        {"python": "/other/python"},
        {"ca_file": tmp_path / "ca.crt"},
        {"profile": SiteProfile.model_validate({"partition": "gpu"})},
        {"profile": SiteProfile.model_validate({"workers": {"drainSeconds": 7}})},
    ]
    made = [reconcile_profile(replace(site, **change)).made_of for change in changes]
    assert len(set(made)) == len(made)
    assert reconcile_profile(replace(site, instance="other", telemetry=(("A", "b"),))).made_of == made[0]
    drained = reconcile_profile(replace(site, **changes[-1]), 3)
    assert (drained.drain_seconds, drained.max_active_jobs) == (17.0, 3)


@pytest.mark.parametrize("ends", [False, True], ids=["job", "bridge"])
async def test_a_refused_job_that_nobody_wants_any_more_is_never_submitted(bench: Bench, ends: bool) -> None:
    bench.slurm.refuse, bench.slurm.limit = "QOSMaxSubmitJobPerUserLimit", True
    await bench.turns(2)
    assert len(bench.fleet.jobs) == 1
    if ends:
        bench.fleet.stop_kind("stage-worker", 5.0, bench.now)
    else:
        bench.store.listed.clear()
        await bench.turns(1)
    assert bench.fleet.jobs == []
    bench.slurm.refuse, before = "", bench.slurm.submissions
    await bench.fleet.act(bench.now + timedelta(seconds=60))
    assert bench.slurm.submissions == before


async def test_after_a_successor_that_failed_the_next_one_waits(bench: Bench) -> None:
    await replaced(bench)
    bench.slurm.end(102, "FAILED", status=1)
    await bench.turns(10)
    assert list(bench.slurm.queued) == [101]
    await bench.turns(1, seconds=SUCCESSOR_AGAIN_SECONDS)
    assert list(bench.slurm.queued) == [101, 103]
