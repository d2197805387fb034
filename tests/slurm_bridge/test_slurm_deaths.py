"""The deaths of workers in Slurm jobs: each that Slurm proves is reported once, by its own name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rollyard_slurm.calls.rest import RestCalls
from rollyard_slurm.errors import SlurmError, SlurmUnavailable
from rollyard_slurm.profile import RestProfile
from rollyard_slurm.readers import command_output, job_json
from rollyard_slurm.submissions import worker_ends
from rollyard_testing.slurm_bridge.bench import Bench, job
from rollyard_testing.slurm_bridge.fakerestd import Restd
from rollyard_testing.slurm_bridge.programs import Programs

WORKER = "qs-12345678-worker-0-101"


@pytest.fixture
async def unseen(tmp_path: Path) -> AsyncIterator[Bench]:
    """Yield a bridge that has submitted the job of one worker, and has not seen it run."""
    async with httpx.AsyncClient(trust_env=False) as http:
        made = Bench(tmp_path / "h", http, job())
        await made.turns()
        yield made


@pytest.fixture
async def bench(unseen: Bench) -> Bench:
    """Return a bridge that has seen the job of its worker run."""
    unseen.slurm.run(101)
    await unseen.turns()
    return unseen


async def test_each_restart_by_slurm_ends_one_worker(bench: Bench) -> None:
    """The script gives the worker of each start a name of its own, by SLURM_RESTART_COUNT."""
    assert '"-$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}"' in bench.slurm.scripts[101]
    for died in (WORKER, f"{WORKER}-r1", f"{WORKER}-r2"):
        bench.store.deaths.clear()
        bench.slurm.change(101, state="COMPLETING")
        await bench.turns()
        assert bench.store.deaths == [], "its processes have not ended"
        bench.slurm.requeue(101)
        await bench.turns(5)
        assert bench.store.deaths == [died]
        bench.slurm.run(101)
        await bench.turns()
    bench.slurm.end(101, "FAILED", status=1)
    await bench.turns(1)
    assert bench.store.deaths[1:] == [f"{WORKER}-r3"]
    assert bench.slurm.submissions == 1, "a restart is Slurm's own matter"


@pytest.mark.parametrize(("used", "keeps_time"), [(0.0, False), (60.0, False), (60.0, True)])
async def test_a_restart_between_two_polls_is_seen(bench: Bench, used: float, keeps_time: bool) -> None:
    """It is on the same node. Slurm keeps the time of submission if it could not launch the script."""
    bench.slurm.change(101, used=used)
    await bench.turns()
    submitted = bench.slurm.queued[101].submitted
    bench.slurm.requeue(101)
    bench.slurm.run(101)
    if keeps_time:
        bench.slurm.change(101, submitted=submitted)
    await bench.turns()
    assert bench.store.deaths == [WORKER]


@pytest.mark.parametrize("runs", [False, True])
async def test_a_restart_while_no_bridge_ran_is_seen(bench: Bench, runs: bool) -> None:
    bench.slurm.requeue(101)
    if runs:
        bench.slurm.run(101)
    bench.begin()
    await bench.turns()
    assert bench.store.deaths == [WORKER]


async def test_a_restart_is_asked_about_until_slurm_answers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(job: int) -> None:
        raise SlurmUnavailable("scontrol did not answer within 20 s")

    with monkeypatch.context() as broken:
        broken.setattr(bench.slurm, "details", refuse)
        bench.slurm.requeue(101)
        await bench.turns()
        bench.slurm.run(101)
        await bench.turns()
    assert bench.store.deaths == []
    await bench.turns()
    assert bench.store.deaths == [WORKER]


async def test_a_run_that_is_seen_only_while_it_completes_has_a_node(unseen: Bench) -> None:
    unseen.slurm.run(101)
    unseen.slurm.change(101, state="COMPLETING", used=0.0)
    await unseen.turns()
    assert unseen.store.deaths == [], "its processes have not ended"
    unseen.slurm.requeue(101)
    await unseen.turns()
    assert unseen.store.deaths == [WORKER]


async def test_of_a_run_between_two_polls_nothing_is_proven(unseen: Bench) -> None:
    """Its node is not known, so that it may run on a lost one. The next worker is known by its own name."""
    unseen.slurm.run(101)
    unseen.slurm.requeue(101)
    await unseen.turns()
    unseen.slurm.run(101)
    await unseen.turns()
    assert unseen.store.deaths == []
    unseen.slurm.requeue(101)
    await unseen.turns()
    assert unseen.store.deaths == [f"{WORKER}-r1"]


@pytest.mark.parametrize("between", ["cn1", "cn2"])
async def test_of_two_restarts_that_were_seen_as_one_nothing_is_proven(bench: Bench, between: str) -> None:
    """The node of the worker in the middle is not known, so that it may run on a lost one."""
    bench.slurm.requeue(101)
    bench.slurm.run(101)
    bench.slurm.change(101, nodes=between)
    bench.slurm.requeue(101)
    await bench.turns()
    assert bench.store.deaths == []
    bench.slurm.run(101)
    await bench.turns()
    bench.slurm.requeue(101)
    await bench.turns()
    assert bench.store.deaths == [f"{WORKER}-r2"], "the count is right again"


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "PREEMPTED"])
async def test_of_an_end_after_a_restart_that_nobody_saw_nothing_is_proven(bench: Bench, state: str) -> None:
    """The nodes that are known are those of the worker before."""
    bench.slurm.requeue(101)
    bench.slurm.run(101)
    bench.slurm.change(101, nodes="cn2")
    bench.slurm.lost_nodes.add("cn2")
    bench.slurm.end(101, state)
    await bench.turns(3)
    assert bench.store.deaths == []


@pytest.mark.parametrize("state", ["NODE_FAIL", "CANCELLED", "TIMEOUT", "PREEMPTED", "requeued", "forgotten"])
async def test_a_worker_on_a_lost_node_may_still_run_and_is_not_reported(bench: Bench, state: str) -> None:
    bench.slurm.lost_nodes.add("cn1")
    if state == "requeued":
        bench.slurm.requeue(101)
    elif state == "forgotten":
        del bench.slurm.queued[101]
    else:
        bench.slurm.end(101, state)
    await bench.turns(3)
    bench.slurm.lost_nodes.clear()
    bench.begin()
    await bench.turns(8)
    assert bench.store.deaths == [], "its leases expire"


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "PREEMPTED", "COMPLETED", "OUT_OF_MEMORY"])
async def test_a_worker_of_a_job_that_ended_is_reported(bench: Bench, state: str) -> None:
    """After a time limit, too, where the next plan launches the workload again at once."""
    if state == "OUT_OF_MEMORY":
        bench.slurm.lost_nodes.add("cn1")  # The node reported it before it was lost.
    bench.slurm.end(101, state)
    await bench.turns(8)
    assert bench.store.deaths == [WORKER]
    assert 102 in bench.slurm.queued


async def test_predecessors_and_those_that_were_stopped_are_reported(bench: Bench) -> None:
    bench.slurm.run(101, left=500.0)
    await bench.turns(5)
    bench.slurm.run(102)
    await bench.turns(3)
    bench.slurm.end(101, "COMPLETED")
    await bench.turns(2)
    assert bench.store.deaths == [WORKER]


async def test_a_job_that_never_ran_has_no_worker_on_any_node(bench: Bench) -> None:
    bench.slurm.run(101, left=500.0)
    await bench.turns(5)
    bench.slurm.lost_nodes.add("")
    bench.slurm.end(102, "CANCELLED")
    await bench.turns(2)
    assert bench.store.deaths == ["qs-12345678-worker-0-102"]


async def test_a_report_that_fails_is_repeated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(report: object) -> None:
        raise SlurmUnavailable("the control plane is away")

    with monkeypatch.context() as broken:
        broken.setattr(bench.store, "worker_died", refuse)
        bench.slurm.requeue(101)
        with pytest.raises(SlurmUnavailable):
            await bench.turns(1)
    await bench.turns(2)
    assert bench.store.deaths == [WORKER]


@pytest.mark.parametrize("how", ["requeued", "ended"])
async def test_where_nodes_cannot_be_asked_about_nothing_is_proven(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A site may have no sinfo, or hide it. All else continues."""

    async def refuse(nodes: str) -> bool:
        raise SlurmError("there is no program 'sinfo' on PATH")

    monkeypatch.setattr(bench.slurm, "nodes_respond", refuse)
    if how == "requeued":
        bench.slurm.requeue(101)
    else:
        bench.slurm.end(101, "TIMEOUT")
    await bench.turns(3)
    assert list(bench.slurm.queued) == ([101] if how == "requeued" else [102])
    assert bench.store.deaths == []


async def test_the_names_that_wait_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_ends, "KEPT", 4)
    ends = worker_ends.WorkerEnds(bench.fleet.submissions)
    (one,) = bench.fleet.jobs
    for number in range(10):
        one.restart_count = number
        ends.note(one)
        ends.note(one)
    (owner,) = bench.fleet.owners()
    assert ends.of(owner) == tuple(f"{WORKER}-r{number}" for number in range(6, 10))


@pytest.mark.parametrize(
    ("shown", "responds"),
    [
        ("idle\nmixed\n", True),
        ("allocated+\n", True),
        ("completing\n", True),
        ("down*\n", False),
        ("idle*\n", False),
        ("draining\n", False),
        ("idle\ndown\n", False),
        ("", False),
    ],
)
async def test_what_sinfo_says_of_a_node(
    programs: Programs, tmp_path: Path, shown: str, responds: bool
) -> None:
    (tmp_path / "shown").write_text(shown)
    programs.write("sinfo", f'echo "$*" >{tmp_path}/args; cat {tmp_path}/shown')
    assert await programs.commands().nodes_respond("cn[1-2]") is responds
    assert "--nodes cn[1-2]" in (tmp_path / "args").read_text()


async def test_a_failing_sinfo_proves_nothing(programs: Programs) -> None:
    programs.write("sinfo", 'echo "slurm_load_node error: Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SlurmUnavailable):
        await programs.commands().nodes_respond("cn1")


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "bin")


@pytest.mark.parametrize(
    ("node", "responds"),
    [
        ({"state": "idle", "state_flags": []}, True),
        ({"state": "allocated", "state_flags": ["COMPLETING"]}, True),
        ({"state": "idle", "state_flags": ["DRAIN"]}, False),
        ({"state": "down", "state_flags": []}, False),
        ({"state": ["MIXED", "PLANNED"]}, True),
        ({"state": ["IDLE", "NOT_RESPONDING"]}, False),
        ({}, False),
    ],
)
def test_what_slurmrestd_says_of_a_node(node: dict[str, object], responds: bool) -> None:
    assert job_json.nodes_respond({"nodes": [node]}) is responds
    assert not job_json.nodes_respond({"nodes": []})


async def test_slurmrestd_is_asked_about_one_node(tmp_path: Path) -> None:
    async with Restd(tmp_path / "s") as restd:
        restd.nodes["cn1"] = {"state": "idle", "state_flags": []}
        calls = RestCalls(
            RestProfile(url=f"unix:{tmp_path}/s"), 20.0, {"PATH": "/bin", "USER": "me"}, tmp_path
        )
        assert await calls.nodes_respond("cn1")
        assert not await calls.nodes_respond("cn[1-2]")
        assert not await calls.nodes_respond("../jobs")
    assert [path.rpartition("/")[2] for _, path, _ in restd.calls if "/node/" in path] == ["cn1"]


def test_the_number_of_restarts_is_read() -> None:
    data = Path(__file__).parent
    assert command_output.details((data.parent / "slurm/data/requeued.job").read_text()).restarts == 1
    assert command_output.details("JobId=1 JobState=RUNNING").restarts is None
    document = json.loads((data / "data/jobs-v0.0.42.json").read_text())
    number = document["jobs"][0]["job_id"]
    found = job_json.details(document, number, 0.0)
    assert found is not None
    assert found.restarts == 0
