"""Workers that stand ready in Slurm jobs: their number, who takes them, once, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rollyard_crds import RolloutJob
from rollyard_drivers.host.home import Home
from rollyard_slurm import bridge
from rollyard_slurm.bridge import batches
from rollyard_slurm.errors import BridgeError
from rollyard_slurm.options import BridgeOptions, reconcile_profile
from rollyard_slurm.profile import SiteProfile, load
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.site import Site
from rollyard_slurm.submissions.ready_workers import YIELD_SECONDS
from rollyard_testing.slurm_bridge.bench import Bench, job


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@pytest.fixture
async def bench(tmp_path: Path, http: httpx.AsyncClient) -> Bench:
    """Return a bridge whose two ready workers run, and that has no RolloutJob yet."""
    made = Bench(tmp_path / "h", http, workers={"ready": 1})
    await made.turns()
    # The older one is taken first.
    made.profile(workers={"ready": 2})
    made.begin()
    await made.turns()
    assert list(made.slurm.queued) == [101, 102]
    made.slurm.run_all()
    await made.turns()
    return made


def named(name: str, uid: str, replicas: int = 1, namespace: str = "default") -> RolloutJob:
    made = job(name, replicas)
    made.metadata.uid, made.metadata.namespace = uid, namespace
    return made


def owner(bench: Bench, number: int) -> str:
    """Return the owner that the comment of a Slurm job names."""
    found = SlurmJobIdentity.parse(bench.slurm.queued[number].comment)
    assert found is not None
    return found.owner


def standing(bench: Bench) -> list[int]:
    """Return the jobs of the workers that stand ready and are not being stopped."""
    found = [one for one in bench.fleet.jobs if one.standing and not one.stopping]
    return [one.job for one in found if one.job is not None]


def workers(bench: Bench) -> dict[str, int | None]:
    """Return the jobs of the workers of RolloutJobs, by the names of their workloads."""
    return {one.workload.name: one.job for one in bench.fleet.jobs if not one.standing}


# Their number


async def test_without_the_setting_none_stands_ready(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http)
    await bench.turns(5)
    assert bench.slurm.submissions == 0


async def test_as_many_stand_ready_as_the_profile_says(bench: Bench) -> None:
    await bench.turns(5)
    assert bench.slurm.submissions == 2
    assert all(owner(bench, number).startswith("readyworker/default/ready-") for number in (101, 102))
    bench.profile(workers={"ready": 1})
    bench.begin()
    await bench.turns(20)
    assert len(standing(bench)) == 1
    bench.profile(workers={"ready": 0})
    bench.begin()
    await bench.turns(20)
    assert bench.slurm.queued == {}
    assert list(bench.site.tokens.iterdir()) == []


async def test_a_new_bridge_finds_them_and_submits_no_second_set(bench: Bench) -> None:
    bench.begin()
    await bench.turns(5)
    assert bench.slurm.submissions == 2
    assert standing(bench) == [101, 102]


async def test_a_bridge_killed_between_sbatch_and_its_note_finds_them(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, workers={"ready": 1})
    bench.slurm.unsure = "taken"
    await bench.turns(1)
    bench.slurm.unsure = ""
    bench.begin()
    await bench.turns(5)
    assert bench.slurm.submissions == 1
    assert standing(bench) == [101]


async def test_each_namespace_of_the_bridge_has_its_own(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, workers={"ready": 1})
    bench.begin(("team-a", "team-b"))
    await bench.turns()
    assert {owner(bench, number).split("/")[1] for number in bench.slurm.queued} == {"team-a", "team-b"}


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "NODE_FAIL", "PREEMPTED"])
async def test_one_that_slurm_ends_is_replaced(bench: Bench, state: str) -> None:
    bench.slurm.end(101, state, status=1 if state == "FAILED" else 0)
    await bench.turns(6)
    assert standing(bench) == [102, 103]
    assert bench.store.deaths == [], "it never had a lease"


async def test_those_that_end_again_and_again_are_made_seldom(bench: Bench) -> None:
    for _ in range(60):
        await bench.turns(1)
        for number in list(bench.slurm.queued):
            bench.slurm.run(number)
            bench.slurm.end(number, "FAILED", status=2)
    assert bench.slurm.submissions <= 14
    assert any("exited" in line or "ended with 2" in line for line in bench.said)
    await bench.turns(5, seconds=120.0)
    assert len(bench.slurm.queued) == 2


async def test_one_near_its_time_limit_is_replaced_and_not_taken(bench: Bench) -> None:
    for number in (101, 102):
        bench.slurm.run(number, left=500.0)
    bench.store.listed.append(named("qs", "1"))
    await bench.fleet.poll(bench.now)
    await bench.turns(1)
    assert workers(bench) == {"qs-1-worker-0": 103}, "a fresh one"
    await bench.turns(15)
    assert [number for number in (101, 102) if number in bench.slurm.queued] == []
    assert len(standing(bench)) == 2
    assert {number for number, signal in bench.slurm.signals if signal == "USR1"} == {101, 102}


async def test_one_with_other_settings_is_replaced_and_not_taken(bench: Bench) -> None:
    """It was submitted with another account, for example, and its work would be charged to that."""
    bench.profile(account="other", workers={"ready": 2})
    bench.begin()
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(1)
    assert "--account=other" in bench.slurm.scripts[103]
    assert workers(bench) == {"qs-1-worker-0": 103}
    await bench.turns(20)
    assert all("--account=other" in bench.slurm.scripts[number] for number in bench.slurm.queued)
    assert len(standing(bench)) == 2


async def test_all_end_with_the_bridge(bench: Bench) -> None:
    bench.fleet.stop_kind("stage-worker", 5.0, bench.now)
    assert len(bench.fleet.left("stage-worker")) == 2
    for _ in range(12):
        bench.now = bench.now.replace(second=(bench.now.second + 1) % 60)
        await bench.fleet.act(bench.now)
    assert {number for number, _ in bench.slurm.signals} == {101, 102}
    assert bench.slurm.submissions == 2, "none is made in their place"


# Who comes first


async def test_a_sites_limit_is_left_to_jobs_and_pools(bench: Bench) -> None:
    """With a limit of two jobs, the two ready workers would else keep a third job away for ever."""
    bench.slurm.refuse, bench.slurm.limit = "QOSMaxSubmitJobPerUserLimit", True
    bench.store.listed.append(named("qs", "1", replicas=3))
    await bench.turns(3)
    assert [workers(bench)[f"qs-1-worker-{index}"] for index in range(3)] == [101, 102, None]
    assert standing(bench) == []
    before = bench.slurm.submissions
    await bench.turns(28)
    assert bench.slurm.submissions <= before + 2, "no ready worker is tried while a job waits"
    bench.slurm.refuse = ""
    await bench.turns(20)
    assert None not in workers(bench).values()


async def test_a_refused_ready_worker_delays_no_job(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, workers={"ready": 2})
    bench.slurm.refuse, bench.slurm.limit = "QOSMaxSubmitJobPerUserLimit", True
    await bench.turns(1)
    assert bench.slurm.submissions == 1
    assert list(bench.fleet.jobs) == []
    bench.slurm.refuse = ""
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(1)
    assert workers(bench) == {"qs-1-worker-0": 101}
    assert "ready workers: sbatch: QOSMaxSubmitJobPerUserLimit" in bench.said


async def test_while_a_worker_waits_for_a_place_none_stands_ready(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1", replicas=3))
    await bench.turns(2)
    assert workers(bench)["qs-1-worker-2"] == 103
    assert len(standing(bench)) == 2, "others take their place"
    for number in standing(bench):
        bench.slurm.run(number)
    await bench.turns(20, seconds=YIELD_SECONDS / 10)
    assert standing(bench) == []
    bench.slurm.run(103)
    await bench.turns(3)
    assert len(standing(bench)) == 2


# Taking one


async def test_a_new_job_takes_one_and_another_takes_its_place(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "12345678-aaaa"))
    await bench.turns(1)
    assert workers(bench) == {"qs-12345678-worker-0": 101}
    (offer,) = bench.store.offers
    assert (offer.namespace, offer.job, offer.uid) == ("default", "qs", "12345678-aaaa")
    assert owner(bench, 101) == f"readyworker/default/{offer.worker}"
    assert offer.arguments[:4] == ["--job", "qs", "--namespace", "default"]
    assert offer.arguments[-2:] == ["--name", "qs-12345678-worker-0-101"]
    await bench.turns(5)
    assert bench.said_of("Running", "status") == "True"
    assert len(bench.store.offers) == 1, "an answered offer is not repeated"
    assert standing(bench) == [102, 103]
    assert bench.slurm.submissions == 3


async def test_two_jobs_in_one_pass_take_two_workers(bench: Bench) -> None:
    bench.store.listed += [named("a", "1"), named("b", "2"), named("c", "3")]
    await bench.turns(1)
    taken = workers(bench)
    assert {taken["a-1-worker-0"], taken["b-2-worker-0"]} == {101, 102}
    assert taken["c-3-worker-0"] == 103, "a fresh one"
    assert "--ready" not in bench.slurm.scripts[103]
    assert len({one.worker for one in bench.store.offers}) == len(bench.store.offers) == 2


async def test_a_pending_one_is_not_taken(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, workers={"ready": 1})
    await bench.turns()
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(1)
    assert workers(bench) == {"qs-1-worker-0": 102}


async def test_a_job_with_a_template_of_its_own_starts_fresh_workers(bench: Bench) -> None:
    made = named("qs", "1")
    made.spec.stages.init.template.labels["team"] = "x"
    bench.store.listed.append(made)
    await bench.turns(1)
    assert workers(bench) == {"qs-1-worker-0": 103}


async def test_a_restart_is_a_fresh_worker(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(2)
    bench.slurm.run_all()
    bench.slurm.end(101, "CANCELLED")
    await bench.turns(8)
    assert bench.store.deaths == ["qs-1-worker-0-101"]
    number = workers(bench)["qs-1-worker-0"]
    assert number is not None
    assert "--ready" not in bench.slurm.scripts[number]
    assert len(bench.store.offers) == 1


async def test_its_slurm_job_ends_with_its_rolloutjob(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(2)
    token = bench.site.ready_token_file("default", bench.store.offers[0].worker)
    assert token.exists()
    bench.store.listed.clear()
    await bench.turns(60)
    assert 101 not in bench.slurm.queued
    assert workers(bench) == {}
    assert not token.exists()
    assert len(standing(bench)) == 2


async def test_near_its_time_limit_it_has_a_fresh_successor(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(2)
    bench.slurm.run(101, left=500.0)
    await bench.turns(3)
    successor = bench.slurm.last
    assert "--ready" not in bench.slurm.scripts[successor]
    bench.slurm.run(successor)
    await bench.turns(3)
    assert workers(bench)["qs-1-worker-0"] == successor or len(workers(bench)) == 1
    assert (101, "USR1") in bench.slurm.signals


# What goes wrong between the steps


async def test_a_bridge_killed_between_taking_and_offering_offers_the_same_again(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    bench.store.away = True
    await bench.turns(2)
    assert bench.store.offers == []
    bench.begin()
    bench.store.away = False
    bench.store.listed.append(named("other", "2"))
    await bench.turns(2)
    first = bench.store.offers[0]
    assert first.job == "qs"
    assert workers(bench)["qs-1-worker-0"] == 101
    assert {one.job: one.worker for one in bench.store.offers}["other"] != first.worker


async def test_an_offer_is_repeated_until_it_is_answered(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    bench.store.away = True
    await bench.turns(3)
    bench.store.away = False
    await bench.turns(3)
    assert len(bench.store.offers) == 1


async def test_a_worker_whose_offer_is_refused_is_replaced_by_a_fresh_one(bench: Bench) -> None:
    bench.store.listed.append(named("qs", "1"))
    bench.store.refusal = "AlreadyAssigned: it serves one job only"
    await bench.turns(1)
    await bench.turns(20)
    assert 101 not in bench.slurm.queued
    number = workers(bench)["qs-1-worker-0"]
    assert number is not None
    assert "--ready" not in bench.slurm.scripts[number]
    assert len(bench.store.offers) == 1
    bench.slurm.run_all()
    await bench.turns(1)
    bench.store.listed.append(named("later", "2"))
    await bench.turns(1)
    assert len(standing(bench)) == 2
    assert len(bench.store.offers) == 1, "the next one would probably be refused, too"


async def test_a_home_that_cannot_be_written_gives_no_worker_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    bench.store.listed.append(named("qs", "1"))
    times = [(one.submitted_at, one.started_at) for one in bench.fleet.jobs]
    monkeypatch.setattr("rollyard_slurm.submissions.home_submissions.save_record", full)
    with pytest.raises(OSError, match="No space left"):
        await bench.turns(1)
    monkeypatch.undo()
    assert standing(bench) == [101, 102]
    assert [(one.submitted_at, one.started_at) for one in bench.fleet.jobs] == times
    assert not any(one.ready for one in bench.fleet.jobs)
    await bench.turns(2)
    assert workers(bench) == {"qs-1-worker-0": 101}
    assert len(bench.store.offers) == 1


# What people see


async def test_a_preview_shows_the_script_of_a_ready_worker(tmp_path: Path) -> None:
    options = BridgeOptions(tmp_path, profile=load(None, {"workers": {"ready": 3}}))
    (text,) = [one.text() for one in batches(options, [])]
    assert "--ready ready-0000000000000000" in text
    assert "#SBATCH --no-requeue" in text, "its token serves once"
    assert "--job" not in text.replace("--job-name", "")


async def test_the_status_shows_the_job_that_a_worker_works_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(bench.site.home)
    (home.root / "bridge.json").write_text(json.dumps({"instance": "abcd1234", "url": "http://h:1"}))
    monkeypatch.setattr(bridge, "slurm_calls", lambda *args, **more: bench.slurm)
    bench.store.listed.append(named("qs", "1"))
    await bench.turns(1)
    lines = [line.split() for line in await bridge.overview(home)]
    assert ["rolloutjob/default/qs", "qs-1-worker-0"] in [line[-2:] for line in lines]
    assert sum(line[-2].startswith("readyworker/default/") for line in lines if len(line) > 4) == 2


def test_their_number_replaces_no_worker_that_runs(tmp_path: Path) -> None:
    hashes = {
        reconcile_profile(Site(tmp_path, "i", "u", SiteProfile.model_validate(given))).made_of
        for given in ({}, {"workers": {"ready": 4}})
    }
    assert len(hashes) == 1


def test_a_wrong_number_is_refused_by_its_name() -> None:
    with pytest.raises(BridgeError, match=r"workers\.ready"):
        load(None, {"workers": {"ready": -1}})
