"""What Slurm's commands print is read, and its reasons are understood."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_slurm.errors import SlurmUnavailable
from rollyard_slurm.profile import JobProfile
from rollyard_slurm.readers import command_output, reasons
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob
from rollyard_slurm.scheduling.time_limits import ahead_seconds, ending, wants_successor

SHOWN = """\
JobId=12 JobName=rollyard-qs-worker-0
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=4294901748 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime={used} TimeLimit={limit} TimeMin=N/A
   Comment=rollyard,instance=ab
   Command=(null)
"""


def shown(state: str, code: str = "0:0", used: str = "00:10:00", limit: str = "01:00:00") -> JobDetails:
    return command_output.details(SHOWN.format(state=state, reason="None", code=code, used=used, limit=limit))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5.0),
        ("10:00", 600.0),
        ("1:02:03", 3723.0),
        ("1-02:03:04", 93784.0),
        ("2-00", 172800.0),
        ("1-06:30", 109800.0),
        ("90", 5400.0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("INVALID", None),
        ("N/A", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert command_output.duration_seconds(text) == seconds


def test_a_queue_with_strange_lines() -> None:
    text = (
        "7|RUNNING|None|cn1|1:00|59:00|1:00:00|2026-01-02T03:04:05|rollyard-a-worker-0|rollyard,instance=ab\n"
        "8|PENDING|ReqNodeNotAvail, UnavailableNodes:cn[1-4]||0:00|1:00:00|1:00:00|N/A|x|a|b|c\n"
        "9|COMPLETING|None|cn2|0:03|UNLIMITED|UNLIMITED|N/A|y|(null)\n"
    )
    first, second, third = command_output.queue(text)
    assert first == QueuedJob(
        id=7,
        state="RUNNING",
        reason="None",
        nodes="cn1",
        used=60.0,
        left=3540.0,
        limit=3600.0,
        name="rollyard-a-worker-0",
        comment="rollyard,instance=ab",
        submitted="2026-01-02T03:04:05",
    )
    assert (second.reason, second.comment) == ("ReqNodeNotAvail, UnavailableNodes:cn[1-4]", "a|b|c")
    assert (third.left, third.limit, third.comment) == (None, None, "")
    assert command_output.queue("\n") == []


def test_a_recorded_queue() -> None:
    """It is of Slurm 22.05.8. One of two jobs of a node that failed was queued again, at another time."""
    recorded = Path(__file__).parent.parent / "slurm" / "data" / "queue.txt"
    jobs = {job.name: job for job in command_output.queue(recorded.read_text())}
    running, failed, again = (jobs[f"rollyard-{name}"] for name in ("running", "node_fail", "requeued"))
    assert (running.state, running.nodes, running.used_nodes) == ("RUNNING", "cn3", "cn3")
    assert running.comment == "owner=running|spec=0"
    assert (failed.state, failed.nodes, failed.used_nodes) == ("NODE_FAIL", "cn2", "")
    assert (again.state, again.nodes, again.used_nodes) == ("PENDING", "", "")
    assert failed.submitted < running.submitted < again.submitted


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs error: x",
        "7|RUNNING",
        "7|RUNNING|None|cn1|1|2|3|n|c",
        "x|RUNNING|None|cn1|1|2|3|t|n|c",
    ],
)
def test_a_queue_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SlurmUnavailable, match="squeue printed"):
        command_output.queue(text)


def test_details() -> None:
    seen = shown("FAILED", "3:0")
    assert (seen.id, seen.state, seen.exit_status, seen.exit_signal) == (12, "FAILED", 3, 0)
    assert (seen.used, seen.limit, seen.live) == (600.0, 3600.0, False)
    assert shown("PENDING").live
    with pytest.raises(SlurmUnavailable):
        command_output.details("slurm_load_jobs error")


def test_accounts_say_more_than_a_word() -> None:
    text = "12|CANCELLED by 1000|0:15|30|01:00:00\n13|FAILED|2:0|5|UNLIMITED\njunk\n14.batch|FAILED|1:0|5|\n"
    found = command_output.accounted(text)
    assert set(found) == {12, 13}
    assert (found[12].state, found[12].exit_signal, found[12].used) == ("CANCELLED", 15, 30.0)
    assert found[13].limit is None


@pytest.mark.parametrize(
    ("text", "job"), [("123\n", 123), ("123;cluster\n", 123), ("site says: hello\n77\n", 77)]
)
def test_the_job_that_sbatch_names(text: str, job: int) -> None:
    assert command_output.submitted(text) == job


def test_an_answer_without_a_job() -> None:
    with pytest.raises(SlurmUnavailable):
        command_output.submitted("hello\n")


FAILED = "sbatch: error: Batch job submission failed"


def pending(reason: str) -> QueuedJob:
    return QueuedJob(5, "PENDING", reason, "", 0.0, None, None, "n", "", "")


@pytest.mark.parametrize(
    ("reason", "blocked"),
    [
        ("Resources", False),
        ("Priority", False),
        ("None", False),
        ("BeginTime", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpCpuLimit", False),
        ("ReqNodeNotAvail, UnavailableNodes:cn1", False),
        ("PartitionConfig", True),
        ("PartitionTimeLimit", True),
        ("BadConstraints", True),
        ("JobHeldAdmin", True),
        ("InvalidQOS", True),
        ("QOSMaxCpuPerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("launch failed requeued held", True),
    ],
)
def test_which_reasons_need_somebody(reason: str, blocked: bool) -> None:
    assert reasons.is_blocked(pending(reason)) == blocked
    assert "Slurm job 5 is pending: " in reasons.waits(pending(reason))


@pytest.mark.parametrize(
    ("stderr", "limit", "away"),
    [
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}: Job violates accounting/QOS policy "
         "(job submit limit, user's size and/or time limits)", True, False),
        ("sbatch: error: AssocMaxSubmitJobLimit", True, False),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True, False),
        ("sbatch: error: invalid partition specified: nosuch", False, False),
        (f"{FAILED}: Requested node configuration is not available", False, False),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", False, True),
        (f"{FAILED}: Socket timed out on send/recv operation", False, True),
        ("sbatch: error: If munged is up, restart with --num-threads=10\nsbatch: error: Munge encode failed: "
         "Failed to access \"/run/munge/munge.socket.2\"", False, True),
    ],
)  # fmt: skip
def test_what_refusals_mean(stderr: str, limit: bool, away: bool) -> None:
    assert reasons.is_limit(stderr) == limit
    assert reasons.is_unavailable(stderr) == away


def test_only_some_failures_leave_a_doubt() -> None:
    assert reasons.is_unsure("Socket timed out on send/recv operation")
    assert not reasons.is_unsure("Unable to contact slurm controller (connect failure)")


def test_complaints_are_told_in_one_line() -> None:
    text = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid\n"
    )
    assert reasons.shorter(text) == "invalid partition specified: x; Batch job submission failed: Invalid"


WANTED = JobProfile(signal_seconds=90)


@pytest.mark.parametrize(
    ("seen", "code", "expected", "words"),
    [
        (shown("TIMEOUT", "0:15"), None, True, "time limit"),
        (shown("PREEMPTED", "0:15"), None, True, "preempted"),
        (shown("NODE_FAIL"), None, False, "node of Slurm job 12 failed"),
        (shown("CANCELLED", "0:15"), None, False, "was cancelled"),
        (shown("OUT_OF_MEMORY", "0:125"), -9, False, "out of memory"),
        (shown("FAILED", "3:0"), 3, False, ""),
        (shown("FAILED", "0:9"), -9, False, ""),
        (shown("COMPLETED"), 0, False, ""),
        (shown("COMPLETED", used="00:58:00"), 0, True, ""),
        (shown("COMPLETED", used="00:58:00", limit="UNLIMITED"), 0, False, ""),
        (shown("COMPLETED", used="00:00:05", limit="00:01:00"), 0, False, ""),
        (shown("COMPLETED", used="00:00:16", limit="00:01:00"), 0, True, ""),
        (shown("FAILED", "1:0", used="00:58:00"), 1, False, ""),
    ],
)
def test_how_jobs_end(seen: JobDetails, code: int | None, expected: bool, words: str) -> None:
    end = ending(seen, WANTED)
    assert (end.code, end.expected) == (code, expected)
    assert words in end.message


def running(left: float | None, limit: float | None) -> QueuedJob:
    return QueuedJob(5, "RUNNING", "None", "cn1", 0.0, left, limit, "n", "", "")


def test_successors_queue_in_time() -> None:
    assert not wants_successor(running(1000.0, 3600.0), WANTED)
    assert wants_successor(running(599.0, 3600.0), WANTED)
    assert not wants_successor(running(None, None), WANTED), "no time limit"
    assert not wants_successor(pending("Priority"), WANTED)
    assert ahead_seconds(600.0, WANTED) == 300.0, "at most half of the limit"
    assert ahead_seconds(36000.0, JobProfile(ahead_seconds=20, signal_seconds=90)) == 150.0


# This is what a real Slurm 22.05 printed.

DATA = Path(__file__).resolve().parents[1] / "slurm" / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("*.job")), ids=lambda path: path.stem)
def test_recorded_jobs_are_read(path: Path) -> None:
    seen = command_output.details(path.read_text())
    assert seen.state in path.read_text()
    assert seen.live == (seen.state in ("PENDING", "RUNNING", "COMPLETING"))


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("cancelled", None, False),
        ("completed", 0, False),
        ("failed", 3, False),
        ("timeout", None, True),
        ("trapped", 143, False),
    ],
)
def test_recorded_ends_are_judged(name: str, code: int | None, expected: bool) -> None:
    end = ending(command_output.details((DATA / f"{name}.job").read_text()), JobProfile())
    assert (end.code, end.expected) == (code, expected)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.refused")), ids=lambda path: path.stem)
def test_recorded_refusals_are_told_apart(path: Path) -> None:
    text = path.read_text()
    assert reasons.is_unavailable(text) == path.stem.startswith("away")
    assert not reasons.is_limit(text)
    assert reasons.shorter(text)
