"""Slurm's commands as programs: what they are given, and what hangs, fails or does not exist."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from rollyard_slurm.addresses import controller, is_loopback
from rollyard_slurm.calls.command_line import SlurmCommands, environment
from rollyard_slurm.errors import SlurmError, SlurmUnavailable, SubmitRefused
from rollyard_slurm.scripts.batch import BatchScript
from rollyard_slurm.submissions.polling import BUSY_SECONDS, IDLE_SECONDS, PollInterval
from rollyard_testing.pace import patience
from rollyard_testing.slurm_bridge.programs import Programs

EMPTY = BatchScript((), (), (), ())


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "bin")


async def test_a_script_is_handed_in(programs: Programs, tmp_path: Path) -> None:
    programs.write("sbatch", f'cat >{tmp_path}/script; echo "$*" >{tmp_path}/args; echo 42')
    assert await programs.commands().submit(EMPTY) == 42
    assert (tmp_path / "script").read_text() == "#!/bin/bash\n"
    assert (tmp_path / "args").read_text() == "--parsable\n"


async def test_a_refusal_says_why(programs: Programs) -> None:
    programs.write("sbatch", 'echo "sbatch: error: invalid partition specified: x" >&2; exit 1')
    with pytest.raises(SubmitRefused, match=r"^invalid partition specified: x$") as refusal:
        await programs.commands().submit(EMPTY)
    assert not refusal.value.limit


async def test_a_controller_away_is_no_refusal(programs: Programs) -> None:
    programs.write("sbatch", 'echo "sbatch: error: Unable to contact slurm controller (x)" >&2; exit 1')
    with pytest.raises(SlurmUnavailable) as trouble:
        await programs.commands().submit(EMPTY)
    assert not trouble.value.unsure


@pytest.mark.parametrize("call", ["submit", "queue"])
async def test_a_command_that_hangs_is_ended_with_its_children(
    programs: Programs, tmp_path: Path, call: str
) -> None:
    for name in ("sbatch", "squeue"):
        # A child holds the pipes open, as a site's wrapper may leave one.
        programs.write(name, f"trap '' TERM\nsleep 300 &\necho $! >{tmp_path}/child\nwait; wait")
    commands, began = programs.commands(timeout=0.5), time.monotonic()
    with pytest.raises(SlurmUnavailable, match=r"did not answer within 0\.5 s") as trouble:
        await (commands.submit(EMPTY) if call == "submit" else commands.queue())
    assert trouble.value.unsure
    assert time.monotonic() - began < patience(10)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + patience(10)
    while os.path.exists(f"/proc/{child}") and "Z" not in Path(f"/proc/{child}/stat").read_text().split():
        assert time.monotonic() < deadline, "its child lives on"
        await asyncio.sleep(0.02)


async def test_no_slurm_here(tmp_path: Path) -> None:
    commands = SlurmCommands(5.0, environment(os.environ), str(tmp_path))
    with pytest.raises(SlurmError, match="no program 'squeue' on PATH: is this a Slurm login node"):
        await commands.queue()


async def test_a_failing_squeue_is_no_empty_queue(programs: Programs) -> None:
    programs.write("squeue", 'echo "slurm_load_jobs error: Unexpected message received" >&2; exit 1')
    with pytest.raises(SlurmUnavailable, match="Unexpected message received"):
        await programs.commands().queue()
    programs.write("squeue", "echo hello")
    with pytest.raises(SlurmUnavailable, match="squeue printed 'hello'"):
        await programs.commands().queue()


async def test_what_the_controller_forgot_is_asked_of_the_accounts(programs: Programs) -> None:
    programs.write("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    programs.write("sacct", 'echo "7|CANCELLED by 0|0:15|3|01:00:00"')
    commands = programs.commands()
    found = await commands.details(7)
    assert found is not None
    assert found.state == "CANCELLED"
    assert await commands.details(8) is None


async def test_accounts_that_are_disabled_are_asked_once(programs: Programs) -> None:
    programs.write("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    programs.write("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    commands = programs.commands()
    assert [await commands.details(7), await commands.details(8)] == [None, None]
    assert commands.counts.runs == {"scontrol": 2, "sacct": 1}


async def test_an_unknown_failure_of_scontrol_ends_no_job(programs: Programs) -> None:
    programs.write("scontrol", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SlurmUnavailable):
        await programs.commands().details(7)


def test_jobs_inherit_no_secrets_and_nothing_that_overrules_their_script() -> None:
    given = {
        "PATH": "/bin",
        "SBATCH_PARTITION": "other",
        "ROLLYARD_TOKEN": "secret",
        "SLURM_CONF": "/etc/x",
        "LC_ALL": "C",
        "SITE": "1",
    }
    made = environment(given, ["SITE"])
    assert {name: made.get(name) for name in given} == {
        "PATH": "/bin",
        "SBATCH_PARTITION": None,
        "ROLLYARD_TOKEN": None,
        "SLURM_CONF": "/etc/x",
        "LC_ALL": "C",
        "SITE": "1",
    }
    assert made["USER"]


@pytest.mark.parametrize(
    ("config", "address"),
    [
        ("SlurmctldHost[0]        = vm(127.0.0.1)\nSlurmctldHost[1] = b\n", "127.0.0.1"),
        ("SlurmctldHost[0]        = head\n", "head"),
        ("ControlAddr = 10.0.0.1\n", "10.0.0.1"),
        ("AuthType = auth/munge\n", ""),
    ],
)
def test_where_the_controller_is(config: str, address: str) -> None:
    assert controller(config) == address


def test_loopback() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")


def looks(pace: PollInterval, seconds: float, changed: bool, idle: bool = False, away: bool = False) -> int:
    """Return the number of polls within so many seconds, half a second a pass."""
    count, now = 0, pace.next
    end = now + seconds
    while now < end:
        if pace.due(now, changed):
            count += 1
            pace.polled(now, changed, idle, away)
        now += 0.5
    return count


def test_slurm_is_asked_seldom_while_nothing_happens() -> None:
    assert looks(PollInterval(), 60.0, changed=True) <= 61
    quiet = PollInterval()
    looks(quiet, 60.0, changed=False)
    assert looks(quiet, 600.0, changed=False) <= 600 / BUSY_SECONDS + 1
    assert looks(quiet, 600.0, changed=False, idle=True) <= 600 / IDLE_SECONDS + 5
    assert looks(PollInterval(), 600.0, changed=True, away=True) <= 600.0, "never more than once a second"
