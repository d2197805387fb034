"""Workers as steps of allocations: what the driver does, what salloc is given, and how a step is told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rollyard_slurm.allocations import MOST, STEP, Salloc, options
from rollyard_slurm.calls.command_line import CommandLine, environment
from rollyard_slurm.errors import ProfileInvalid, SlurmAway
from rollyard_slurm.profile import load
from rollyard_slurm.submissions.fleet import UNSURE_SECONDS
from rollyard_testing.slurm_bridge.bench import Bench, job
from rollyard_testing.slurm_bridge.programs import Programs
from rollyard_testing.slurm_bridge.scripts import WORKER, script, site


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@pytest.fixture
def bench(tmp_path: Path, http: httpx.AsyncClient) -> Bench:
    made = Bench(tmp_path / "h", http, job(), start="salloc")
    made.allocations.free = 1
    return made


# What the driver does


async def test_a_free_node_is_taken_at_once(bench: Bench) -> None:
    await bench.turns(2)
    assert bench.slurm.submissions == 0, "no batch job"
    assert bench.slurm.queued[101].state == "RUNNING"
    await bench.turns(2)
    assert bench.said_of("Running", "status") == "True"
    assert bench.allocations.tries == 1


async def test_where_nothing_is_free_it_is_a_batch_job_in_the_same_turn(
    tmp_path: Path, http: httpx.AsyncClient
) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=3), start="salloc")
    bench.allocations.free = 1
    await bench.turns(1)
    assert [one.state for one in bench.slurm.queued.values()] == ["RUNNING", "PENDING", "PENDING"]
    assert bench.slurm.submissions == 2
    assert bench.said == []
    bench.store.listed.clear()
    await bench.turns(2)
    assert bench.allocations.signals == [(101, "USR1")], "each told in its own way"
    assert bench.slurm.signals == []
    assert sorted(bench.slurm.cancelled) == [102, 103]


async def test_only_where_it_is_asked_for(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, job(), start="salloc", workers={"start": "sbatch"})
    bench.allocations.free = 1
    await bench.turns()
    assert (bench.allocations.tries, bench.slurm.submissions) == (0, 1)


async def test_their_number_is_bounded(tmp_path: Path, http: httpx.AsyncClient) -> None:
    bench = Bench(tmp_path / "h", http, job(replicas=MOST + 3), start="salloc")
    bench.allocations.free = MOST + 3
    await bench.turns(6)
    assert bench.allocations.tries == MOST
    assert bench.slurm.submissions == 3


async def test_a_new_bridge_goes_on_with_an_allocation(bench: Bench) -> None:
    await bench.turns()
    bench.begin()
    await bench.turns(5)
    assert list(bench.slurm.queued) == [101]
    assert (bench.allocations.tries, bench.slurm.submissions) == (1, 0)
    bench.store.listed.clear()
    await bench.turns(1)
    assert bench.allocations.signals == [(101, "USR1")], "it knows still what it is"


@pytest.mark.parametrize("stepping", [True, False])
async def test_a_bridge_killed_while_salloc_asked_finds_the_allocation(bench: Bench, stepping: bool) -> None:
    bench.allocations.unsure = "taken"
    await bench.turns(1)
    bench.allocations.unsure = ""
    if not stepping:
        bench.allocations.stepping.clear()
    bench.begin()
    await bench.turns(8)
    if stepping:
        assert list(bench.slurm.queued) == [101], "it works on"
        assert bench.slurm.cancelled == []
    else:
        assert bench.slurm.cancelled == [101], "salloc was killed before it began a step"
        assert list(bench.slurm.queued) == [102]
    assert bench.said_of("Degraded", "status") == "False", "nothing is wrong with the worker"


async def test_a_salloc_that_hangs_is_not_repeated_while_its_allocation_may_come(bench: Bench) -> None:
    bench.allocations.unsure = "lost"
    await bench.turns(4)
    assert (bench.allocations.tries, bench.slurm.submissions) == (1, 0)
    bench.allocations.unsure = ""
    await bench.turns(4, seconds=UNSURE_SECONDS / 2)
    assert list(bench.slurm.queued) == [101]


async def test_a_step_that_outlives_salloc_works_on_and_its_allocation_ends_with_it(bench: Bench) -> None:
    bench.allocations.alive = False
    await bench.turns(5)
    assert bench.slurm.cancelled == []
    bench.allocations.stepping.clear()
    await bench.turns(1)
    assert bench.slurm.cancelled == [], "salloc may release it in this moment"
    await bench.turns(3)
    assert bench.slurm.cancelled == [101]


async def test_scancel_and_a_lost_node_are_made_good(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.end(101, "CANCELLED")
    await bench.turns(1)
    assert "was cancelled" in bench.said_of("Degraded")
    await bench.turns(4)
    assert "restarts=1" in bench.slurm.queued[102].comment
    bench.slurm.run(102)
    bench.allocations.free = 1
    await bench.turns(1)
    bench.slurm.end(102, "NODE_FAIL")
    await bench.turns(8)
    assert "restarts=2" in bench.slurm.queued[103].comment
    assert bench.slurm.queued[103].state == "RUNNING", "by salloc: the other was a batch job"


async def test_a_step_that_ends_lowers_the_limit_and_that_is_no_time_limit(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.run(101, left=3000.0)
    await bench.turns()
    bench.slurm.change(101, limit=720.0, left=60.0, used=660.0)
    await bench.turns(3)
    assert list(bench.slurm.queued) == [101], "no successor"
    bench.slurm.end(101, "FAILED", status=1)
    await bench.turns(1)
    assert "exited with 1" in bench.said_of("Degraded")
    assert "srun: error: it cannot run" in bench.said_of("Degraded"), "there is no log"


async def test_a_step_out_of_memory_is_told_as_a_batch_job_would_be(bench: Bench) -> None:
    bench.allocations.complaint = "srun: error: cn1: task 0: Out Of Memory"
    await bench.turns()
    bench.slurm.end(101, "FAILED", status=137)
    await bench.turns(1)
    assert "ran out of memory: raise `memory` in the profile" in bench.said_of("Degraded")


async def test_a_successor_takes_over_from_an_allocation(bench: Bench) -> None:
    await bench.turns()
    bench.slurm.run(101, left=500.0)
    bench.allocations.free = 1
    await bench.turns(4)
    assert [one.state for one in bench.slurm.queued.values()] == ["RUNNING", "RUNNING"]
    assert bench.allocations.signals == [(101, "USR1")]
    bench.slurm.end(101, "TIMEOUT")
    await bench.turns(3)
    assert list(bench.slurm.queued) == [102]
    assert bench.said_of("Degraded", "status") == "False"


# What salloc is given


def test_the_profile_or_the_command_line_says_how_they_start(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("workers: {start: salloc}\n")
    made = load(path)
    assert (made.of("stage-worker").start, made.of("backend").start) == ("salloc", None)
    assert load(path, {"start": "sbatch"}).of("stage-worker").start == "sbatch"
    path.write_text("start: srun\n")
    with pytest.raises(ProfileInvalid, match=r"start: .*'sbatch' or 'salloc'"):
        load(path)


def test_salloc_asks_for_what_the_script_asks_for() -> None:
    text = script(WORKER, site(home=Path('/shared/my "home" 100%')))
    found = options(text)
    assert '--chdir=/shared/my "home" 100%' in found
    assert "--signal=URG@90" in found
    names = {word.partition("=")[0] for word in found}
    assert {"--job-name", "--comment", "--nodes", "--ntasks", "--mem"} <= names
    assert not names & {"--output", "--open-mode", "--requeue", "--no-requeue"}


class Hands:
    """Programs of a Slurm that says what it is told to."""

    def __init__(self, tmp_path: Path, timeout: float = 20.0) -> None:
        self.programs = Programs(tmp_path / "bin")
        self.said: list[str] = []
        commands = CommandLine(timeout, environment(os.environ), str(self.programs.folder))
        self.folder = tmp_path / "allocations"
        self.salloc = Salloc(commands, self.folder, self.said.append)


async def test_what_is_granted_runs_on_by_itself(tmp_path: Path) -> None:
    hands = Hands(tmp_path)
    hands.programs.write(
        "salloc", f'echo "$@" >{tmp_path}/args; echo "Granted job allocation 7" >&2; sleep 60'
    )
    made = await hands.salloc.allocate("aa", "#!/bin/bash\n#SBATCH --mem=1G\n", "/logs/w")
    assert made is not None
    assert made.launcher is not None
    try:
        assert made.job == 7
        assert os.getsid(made.launcher.pid) != os.getsid(0)
        words = (tmp_path / "args").read_text().split()
        assert words[:3] == ["--immediate", "--mem=1G", f"{hands.programs.folder}/srun"]
        assert words[-3:] == [f"{hands.folder}/step.sh", f"{hands.folder}/aa.sh", "/logs/w"]
        assert (hands.folder / "aa.sh").stat().st_mode & 0o777 == 0o700
    finally:
        os.killpg(os.getpgid(made.launcher.pid), signal.SIGKILL)
    hands.salloc.forget("aa")
    assert [path.name for path in hands.folder.iterdir()] == ["step.sh"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "salloc: error: Unable to allocate resources: Immediate execution impossible",
            0,
        ),
        ("salloc: error: Unable to allocate resources: Requested nodes are busy", 0),
        ("salloc: unrecognized option '--kill-on-invalid-dep=yes'", 1),
    ],
)
async def test_what_is_not_granted_is_left_to_sbatch(tmp_path: Path, words: str, told: int) -> None:
    hands = Hands(tmp_path)
    hands.programs.write("salloc", f'echo "{words}" >&2; exit 1')
    for launch in ("aa", "bb"):
        assert await hands.salloc.allocate(launch, "#!/bin/bash\n", "/logs/w") is None
    assert len(hands.said) == told
    assert [path.name for path in hands.folder.iterdir()] == ["step.sh"]


async def test_a_controller_away_is_no_refusal_of_an_allocation(tmp_path: Path) -> None:
    hands = Hands(tmp_path)
    hands.programs.write("salloc", 'echo "salloc: error: Unable to contact slurm controller (x)" >&2; exit 1')
    with pytest.raises(SlurmAway, match="Unable to contact slurm controller"):
        await hands.salloc.allocate("aa", "#!/bin/bash\n", "/logs/w")


async def test_a_salloc_that_hangs_is_ended(tmp_path: Path) -> None:
    hands = Hands(tmp_path, timeout=0.5)
    hands.programs.write("salloc", f"trap '' TERM; echo $$ >{tmp_path}/pid; exec sleep 300")
    with pytest.raises(SlurmAway, match=r"did not answer within 0\.5 s") as trouble:
        await hands.salloc.allocate("aa", "#!/bin/bash\n", "/logs/w")
    assert trouble.value.unsure
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split():
        assert time.monotonic() < deadline, "it lives on"
        await asyncio.sleep(0.02)


async def test_steps_are_those_that_programs_run_in(tmp_path: Path) -> None:
    hands = Hands(tmp_path)
    hands.programs.write("squeue", 'printf "%s\\n" 7.0 8.extern 9.12 9.extern')
    assert await hands.salloc.steps([7, 8, 9, 10]) == {7, 9}


async def test_signals_are_those_that_sandboxes_ignore(tmp_path: Path) -> None:
    hands = Hands(tmp_path)
    hands.programs.write("scancel", f'echo "$@" >>{tmp_path}/args')
    await hands.salloc.signal([7, 8], "USR1")
    await hands.salloc.signal([7], "USR2")
    assert (tmp_path / "args").read_text() == "--signal=URG 7 8\n--signal=28 7\n"


# How the step is told


def test_who_does_not_expect_them_ignores_the_signals() -> None:
    words = ["bash", "-c", "kill -URG $$; kill -28 $$; echo on"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "on\n"


class Step:
    """step.sh around a script, in a process group that signals reach as they reach a step's processes."""

    def __init__(self, tmp_path: Path, body: str) -> None:
        (tmp_path / "step.sh").write_text(STEP)
        (tmp_path / "body.sh").write_text(body)
        self.tmp_path = tmp_path
        tools = tmp_path / "tools"
        tools.mkdir()
        (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/lowered\n')
        (tools / "scontrol").chmod(0o755)
        env = {**os.environ, "SLURM_JOB_ID": "7", "PATH": f"{tools}:{os.environ['PATH']}"}
        words = ["bash", str(tmp_path / "step.sh"), str(tmp_path / "body.sh"), str(tmp_path / "w")]
        self.process = subprocess.Popen(words, env=env, start_new_session=True)

    def said(self, *lines: str) -> None:
        deadline = time.monotonic() + 20
        log = self.tmp_path / "w-7.log"
        while (log.read_text().split() if log.exists() else []) != list(lines):
            assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
            time.sleep(0.01)


BODY = """\
bystander() { exec -a bystander sleep 60; }
bystander &
trap 'echo drain' USR1
trap 'echo hurry; kill $!; exit 5' USR2
echo up
while :; do wait; sleep 0.05; done
"""


def test_a_signal_to_all_of_a_step_is_the_scripts_alone(tmp_path: Path) -> None:
    step = Step(tmp_path, BODY)
    step.said("up")
    os.killpg(step.process.pid, signal.SIGURG)
    step.said("up", "drain")
    os.killpg(step.process.pid, signal.SIGWINCH)
    step.said("up", "drain", "hurry")
    assert step.process.wait(20) == 5
    assert (tmp_path / "lowered").read_text() == "update JobId=7 TimeLimit=2\n"


def test_a_step_that_is_terminated_waits_for_its_script(tmp_path: Path) -> None:
    step = Step(tmp_path, "trap 'sleep 0.3; echo over; exit 3' TERM\necho up\nsleep 60 & wait $!\n")
    step.said("up")
    os.killpg(step.process.pid, signal.SIGTERM)
    assert step.process.wait(20) == 3
    step.said("up", "over")
