"""slurmrestd: what it is asked, what its answers mean, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rollyard_slurm.bridge import rest_of, sample_job, scripts
from rollyard_slurm.calls.command_line import environment
from rollyard_slurm.calls.rest import RestCalls
from rollyard_slurm.errors import BridgeError, SlurmError, SlurmUnavailable, SubmitRefused
from rollyard_slurm.options import BridgeOptions
from rollyard_slurm.profile import RestProfile, SiteProfile, load
from rollyard_slurm.readers import job_json
from rollyard_slurm.readers.jobs import JobDetails
from rollyard_slurm.scripts import job_fields
from rollyard_slurm.scripts.batch import BatchScript
from rollyard_testing.pace import patience
from rollyard_testing.slurm_bridge.fakerestd import Restd

DATA = Path(__file__).parent / "data"
BATCH = BatchScript(
    (
        ("job-name", "rollyard-x"),
        ("comment", "rollyard,instance=ab"),
        ("signal", "B:USR1@30"),
        ("no-requeue", None),
        ("nodes", "1"),
        ("ntasks", "1"),
        ("time", "1:00:30"),
        ("mem", "2G"),
        ("gres", "gpu:a100:2,shard:1"),
        ("exclude", "cn[1,3],cn7"),
        ("exclusive", None),
    ),
    ("--licenses=matlab:1", "--gpus-per-node=1"),
    ("true",),
    ("echo",),
)


def calls(socket: Path, home: Path, timeout: float = 20.0, **more: Any) -> RestCalls:
    wanted = RestProfile(url=f"unix:{socket}", **more)
    return RestCalls(wanted, timeout, {"PATH": "/bin", "USER": "me"}, home)


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s"


def recorded(version: int) -> Any:
    return json.loads((DATA / f"jobs-v0.0.{version}.json").read_text())


# These are answers of real servers: Slurm 22.05.8 (v0.0.38) and 24.11.6 (v0.0.40 and v0.0.42).


@pytest.mark.parametrize("version", [38, 42])
def test_recorded_jobs_in_both_shapes(version: int) -> None:
    document = recorded(version)
    by_name = {one["name"]: one for one in document["jobs"]}
    start = job_json.number(by_name["rollyard-running"]["start_time"])
    assert start is not None
    now = start + 25.0
    running, waiting = sorted(job_json.queue(document, 1000, now), key=lambda one: one.state, reverse=True)
    assert (running.state, running.used, running.left, running.limit) == ("RUNNING", 25.0, 1775.0, 1800.0)
    assert (running.nodes, running.name, running.reason) == ("vm", "rollyard-running", "None")
    assert running.comment == "rollyard,instance=ab,of=running"
    assert (waiting.state, waiting.reason, waiting.used, waiting.left) == ("PENDING", "Resources", 0.0, 300.0)
    assert running.submitted == str(job_json.number(by_name["rollyard-running"]["submit_time"]))
    assert job_json.queue(document, 1001, now) == []

    def ended(name: str) -> JobDetails:
        number = job_json.number(by_name[f"rollyard-{name}"]["job_id"])
        assert number is not None
        found = job_json.details(document, number, now)
        assert found is not None
        return found

    failed, killed, cancelled = ended("failed"), ended("killed"), ended("cancelled")
    assert (failed.state, failed.exit_status, failed.exit_signal, failed.live) == ("FAILED", 3, 0, False)
    assert (killed.state, killed.exit_status, killed.exit_signal) == ("FAILED", 0, 9)
    assert (cancelled.state, cancelled.limit) == ("CANCELLED", 300.0)
    assert 0 <= cancelled.used < 30
    assert ended("completed").state == "COMPLETED"
    assert job_json.details(document, 987654, now) is None


def test_recorded_jobs_of_v40() -> None:
    document = recorded(40)
    assert [one.state for one in job_json.queue(document, 1000, time.time())] == ["RUNNING"]


def test_states_numbers_and_exits_of_every_shape() -> None:
    assert job_json.state("PENDING") == job_json.state(["PENDING"]) == "PENDING"
    assert job_json.state(["RUNNING", "COMPLETING"]) == "COMPLETING"
    assert job_json.state(["PENDING", "REQUEUED"]) == "REQUEUED"
    numbers = (5, {"set": True, "infinite": False, "number": 5})
    assert [job_json.number(one) for one in numbers] == [5, 5]
    unset = (
        None,
        0xFFFFFFFE,
        {"set": False, "infinite": False, "number": 0},
        {"set": True, "infinite": True},
    )
    assert [job_json.number(one) for one in unset] == [None] * 4
    assert job_json.exit_of(768) == (3, 0)
    assert job_json.exit_of({"set": True, "infinite": False, "number": 9}) == (0, 9)
    taken_apart = {"status": ["SIGNALED"], "return_code": {"set": False}, "signal": {"id": numbers[1]}}
    assert job_json.exit_of(taken_apart) == (0, 5)


@pytest.mark.parametrize("document", [None, [], {"jobs": None}, {"jobs": [1]}, {"errors": []}])
def test_no_list_of_jobs_is_no_empty_queue(document: Any) -> None:
    with pytest.raises(SlurmUnavailable):
        job_json.queue(document, 1000, 0.0)


def test_a_suspended_job_uses_none_of_its_time() -> None:
    job = {
        "job_id": 7, "user_id": 1000, "job_state": "SUSPENDED", "time_limit": 10, "start_time": 100,
        "end_time": 700, "pre_sus_time": 50, "suspend_time": 160,
    }  # fmt: skip
    (one,) = job_json.queue({"jobs": [job]}, 1000, 400.0)
    assert (one.used, one.left) == (50.0, 550.0)
    (one,) = job_json.queue({"jobs": [{**job, "job_state": "RUNNING"}]}, 1000, 200.0)
    assert one.used == 90.0


# What is asked for.


def test_fields_of_v38_are_sbatch_s_words() -> None:
    options = [*BATCH.options, *job_fields.sbatch_options(BATCH.further)]
    assert job_fields.fields(options, {"A": "b c"}, 38) == {
        "name": "rollyard-x", "comment": "rollyard,instance=ab", "no_requeue": True, "nodes": "1",
        "tasks": "1",
        "time_limit": "1:00:30", "memory_per_node": "2G", "gres": "gpu:a100:2,shard:1",
        "exclude_nodes": "cn[1,3],cn7", "exclusive": "exclusive", "licenses": "matlab:1",
        "gpus_per_node": "1",
        "environment": {"A": "b c"},
    }  # fmt: skip


def test_fields_of_later_versions_have_types() -> None:
    options = [*BATCH.options, *job_fields.sbatch_options(BATCH.further)]
    made = job_fields.fields(options, {"A": "b c"}, 42)
    assert made == {
        "name": "rollyard-x", "comment": "rollyard,instance=ab", "requeue": False, "tasks": 1,
        "minimum_nodes": 1, "maximum_nodes": 1, "licenses": "matlab:1", "shared": ["none"],
        "kill_warning_signal": "USR1", "kill_warning_flags": ["BATCH_JOB"],
        "kill_warning_delay": {"set": True, "infinite": False, "number": 30},
        "time_limit": {"set": True, "infinite": False, "number": 61},
        "memory_per_node": {"set": True, "infinite": False, "number": 2048},
        "tres_per_node": "gres/gpu:a100:2,gres/shard:1,gres/gpu:1", "excluded_nodes": ["cn[1,3]", "cn7"],
        "environment": ["A=b c"],
    }  # fmt: skip
    assert job_fields.fields(options, {}, 39)["tres_per_node"].startswith("gres:gpu:a100:2,gres:shard:1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rest: {url: /run/s}", r"rest\.url: .*must be unix:/PATH, http://HOST:PORT or https://HOST:PORT"),
        ("rest: {url: 'http://user:pw@h:1'}", r"rest\.url"),
        (f"rest: {{url: 'unix:/{'x' * 120}'}}", "at most 107 bytes"),
        ("rest: {url: 'unix:/s', version: 0.0.38}", r"rest\.version"),
        ("rest: {url: 'unix:/s', tokenFile: jwt}", r"rest\.tokenFile"),
        (
            "rest: {url: 'unix:/s'}\nworkers: {sbatch: [--switches=1]}",
            r"workers\.sbatch: --switches cannot be",
        ),
        ("rest: {url: 'unix:/s'}\nsbatch: [-Lx]", "-Lx cannot be passed to slurmrestd"),
        ("rest: {url: 'unix:/s'}\nsbatch: [--licenses]", "--licenses takes a value"),
    ],
)
def test_a_profile_that_cannot_be(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(BridgeError, match=words):
        load(path)


def test_the_command_line_s_url_keeps_the_profile_s_token(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("rest: {url: 'http://a:1', tokenFile: /jwt}")
    made = load(path, {"rest": {"url": "http://b:2"}}).rest
    assert made is not None
    assert (made.url, made.token_file) == ("http://b:2", "/jwt")


# One server.


@pytest.mark.parametrize(("version", "flags"), [(38, False), (42, True)])
async def test_calls(socket: Path, tmp_path: Path, version: int, flags: bool) -> None:
    document = recorded(version)
    async with Restd(socket, version, flags) as restd:
        restd.jobs = {
            job_json.number(one["job_id"]) or 0: one | {"user_id": os.getuid()} for one in document["jobs"]
        }
        slurm = calls(socket, tmp_path)
        assert await slurm.submit(BATCH) == 42
        _, path, sent = restd.calls[-1]
        assert path == f"/slurm/v0.0.{version}/job/submit"
        assert sent["script"].startswith("#!/bin/bash\n#SBATCH --job-name=rollyard-x\n")
        assert ("signals" in sent["script"]) == (not flags), "the script looks into a file only where it must"
        assert (
            "PATH=/bin" in sent["job"]["environment"]
            if flags
            else sent["job"]["environment"]["PATH"] == "/bin"
        )
        assert sorted(one.state for one in await slurm.queue()) == ["PENDING", "RUNNING"]
        running = next(one.id for one in await slurm.queue() if one.state == "RUNNING")
        found = await slurm.details(running)
        assert found is not None
        assert found.live
        assert await slurm.details(999) is None
        before = len(restd.calls)
        await slurm.signal([running], "USR1")
        told = [path for method, path, _ in restd.calls[before:] if method == "DELETE"]
        if flags:
            assert told == [f"/slurm/v0.0.42/job/{running}?signal=USR1&flags=BATCH_JOB"]
        else:
            assert told == [], "it would reach every process of the job"
            assert (tmp_path / "signals" / str(running)).read_text() == "USR1\n"
        await slurm.cancel([running, 999])
        assert restd.calls[-1][:2] == ("DELETE", f"/slurm/v0.0.{version}/job/999")
        assert str(slurm.counts).startswith("Slurm was asked ")
        assert slurm.counts.runs["submit"] == slurm.counts.runs["openapi"] == 1


async def test_files_of_jobs_that_ended_are_removed_and_time_is_told_once(
    socket: Path, tmp_path: Path
) -> None:
    async with Restd(socket) as restd:
        job = next(one for one in recorded(38)["jobs"] if one["job_state"] == "RUNNING")
        job |= {"user_id": os.getuid(), "start_time": int(time.time()) - 100}
        restd.jobs = {job["job_id"]: job}
        folder = tmp_path / "signals"
        folder.mkdir()
        for name in (str(job["job_id"]), "77"):
            (folder / name).touch()
        slurm = calls(socket, tmp_path)
        for _ in range(2):
            await slurm.queue()
        (left,) = folder.iterdir()
        word, number = left.read_text().split()
        assert word == "left"
        assert 1600 < float(number) <= 1700


async def test_a_refusal_and_a_limit(socket: Path, tmp_path: Path) -> None:
    async with Restd(socket, refuse="Invalid partition name specified") as restd:
        slurm = calls(socket, tmp_path)
        with pytest.raises(SubmitRefused, match=r"^Invalid partition name specified$") as refusal:
            await slurm.submit(BATCH)
        assert (refusal.value.limit, refusal.value.by) == (False, "slurmrestd")
        restd.refuse = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
        with pytest.raises(SubmitRefused) as refusal:
            await slurm.submit(BATCH)
        assert refusal.value.limit


@pytest.mark.parametrize(
    ("broken", "unsure", "words"),
    [
        ("hang", True, "did not answer within 0.5 s"),
        ("cut", True, "broke off"),
        ("away", False, "Unable to contact slurm controller"),
        ("proxy", False, "Bad Gateway"),
    ],
)
async def test_a_server_that_breaks(
    socket: Path, tmp_path: Path, broken: str, unsure: bool, words: str
) -> None:
    async with Restd(socket) as restd:
        slurm = calls(socket, tmp_path, timeout=0.5 if broken == "hang" else 20.0)
        await slurm.queue()
        restd.broken = broken
        with pytest.raises(SlurmUnavailable, match=words) as trouble:
            await slurm.submit(BATCH)
        assert trouble.value.unsure == unsure
        with pytest.raises(SlurmUnavailable):
            await slurm.queue()
        with pytest.raises(SlurmUnavailable):
            await slurm.details(7)
        restd.broken = ""
        assert await slurm.submit(BATCH) == 42


async def test_a_server_that_goes_and_comes_back_as_another(socket: Path, tmp_path: Path) -> None:
    slurm = calls(socket, tmp_path)
    async with Restd(socket):
        slurm.server.check()
        await slurm.queue()
    socket.unlink(missing_ok=True)
    with pytest.raises(SlurmUnavailable, match="cannot be reached") as trouble:
        await slurm.submit(BATCH)
    assert not trouble.value.unsure
    with pytest.raises(SlurmError, match=r"rest\.url: there is no socket .*does slurmrestd run here"):
        slurm.server.check()
    async with Restd(socket, version=42, flags=True):
        with pytest.raises(SlurmUnavailable):
            await slurm.queue()  # The old version's paths are gone.
        assert await slurm.queue() == []


async def test_versions_are_asked_for(socket: Path, tmp_path: Path) -> None:
    async with Restd(socket, version=40):
        assert (await calls(socket, tmp_path).server.api()).version == 40
        with pytest.raises(
            SlurmError, match=r"rest\.version: .* has no v0\.0\.38; it has v0\.0\.7, v0\.0\.40"
        ):
            await calls(socket, tmp_path, version="v0.0.38").server.api()
    async with Restd(socket, version=36):
        with pytest.raises(SlurmError, match=r"v0\.0\.38 \(Slurm 22\.05\) or newer is needed"):
            await calls(socket, tmp_path).server.api()


async def test_clocks_that_differ(socket: Path, tmp_path: Path) -> None:
    async with Restd(socket, clock=int(time.time()) + 300) as restd:
        job = next(one for one in recorded(38)["jobs"] if one["job_state"] == "RUNNING")
        restd.jobs = {1: job | {"user_id": os.getuid(), "start_time": int(time.time()) + 200}}
        (one,) = await calls(socket, tmp_path).queue()
        assert 90 < one.used < 130, "by the controller's clock"


def jwt(seconds: float) -> str:
    claims = (
        base64.urlsafe_b64encode(json.dumps({"exp": time.time() + seconds}).encode()).decode().rstrip("=")
    )
    return f"eyJhbGciOiJIUzI1NiJ9.{claims}.c2VjcmV0"


async def test_a_token_that_expires_and_is_renewed(
    socket: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file, old, new = tmp_path / "jwt", jwt(-60), jwt(600)
    file.write_text(f"SLURM_JWT={old}\n")
    file.chmod(0o600)
    async with Restd(socket, token=new) as restd:
        slurm = calls(socket, tmp_path, token_file=str(file))
        with pytest.raises(
            SlurmUnavailable, match=r"does not take the token in .*jwt, which has expired"
        ) as trouble:
            await slurm.queue()
        assert not trouble.value.unsure
        file.write_text(new)
        assert await slurm.queue() == []
        assert await slurm.submit(BATCH) == 42
        file.write_text(jwt(700))
        with pytest.raises(SlurmUnavailable, match="it may have expired"):
            await slurm.queue()
        said = caplog.text + str(trouble.value) + json.dumps(restd.calls)
        assert old not in said
        assert new not in said
        with pytest.raises(SlurmUnavailable, match="a call without a token"):
            await calls(socket, tmp_path).queue()


async def test_a_token_s_file_is_the_user_s_alone(socket: Path, tmp_path: Path) -> None:
    file = tmp_path / "jwt"
    async with Restd(socket):
        slurm = calls(socket, tmp_path, token_file=str(file))
        for text, mode, words in (
            (None, 0, "cannot be read"),
            ("x" * 20, 0o640, "others may read .*chmod 600"),
            ("two words", 0o600, "holds no token"),
            ("", 0o600, "holds no token"),
        ):
            if text is not None:
                file.write_text(text)
                file.chmod(mode)
            with pytest.raises(SlurmError, match=f"rest.tokenFile: .*{words}"):
                slurm.server.check()
            with pytest.raises(SlurmUnavailable, match=r"rest\.tokenFile"):
                await slurm.queue()


def test_no_token_reaches_a_job(tmp_path: Path) -> None:
    given = {"PATH": "/bin", "SLURM_JWT": "secret"}
    slurm = RestCalls(RestProfile(url="http://h:1"), 1.0, environment(given, ["SLURM_JWT"]), tmp_path)
    assert "secret" not in json.dumps(slurm._env)


async def test_a_dry_run_shows_the_fields(socket: Path, tmp_path: Path) -> None:
    given = {"rest": {"url": f"unix:{socket}"}, "partition": "cpu", "sbatch": ["--nice=5"]}
    options = BridgeOptions(tmp_path, profile=SiteProfile.model_validate(given))
    async with Restd(socket) as restd:
        (text,) = await scripts(options, [sample_job()])
        script, _, fields = text.partition("\n# fields for slurmrestd (v0.0.38), beside an environment:\n")
        assert "#SBATCH --partition=cpu\n" in script
        assert "#SBATCH --nice=5\n" in script
        sent = json.loads(fields)
        assert (sent["partition"], sent["nice"], sent["requeue"]) == ("cpu", "5", True)
        assert "environment" not in sent
        assert not any(method == "POST" for method, _, _ in restd.calls)
    (text,) = await scripts(options, [sample_job()])
    assert "# fields for slurmrestd: not known: slurmrestd at unix:" in text


def test_the_last_bridge_s_slurmrestd_is_remembered() -> None:
    wanted = RestProfile(url="http://h:1", token_file="/jwt", version="v0.0.40")
    assert rest_of({"rest": wanted.model_dump(exclude_none=True)}) == wanted
    assert rest_of({"instance": "ab"}) is None


# The script that looks into a file.


async def hears(socket: Path, home: Path, job: int, words: str, limit: str | None) -> int:
    """Run a script as v0.0.38 gets it, and return its exit status when its file says this."""
    batch = BatchScript(
        (("signal", "B:USR1@59"), *((("time", limit),) if limit is not None else ())),
        (),
        ("trap 'exit 3' USR1", "trap 'exit 4' USR2"),
        # Its child has no trap: a signal to it would end it, and the script with it.
        ("sleep 60 & child=$!", 'wait "$child"', "exit 9"),
    )
    async with Restd(socket):
        slurm = calls(socket, home)
        text = (await slurm.fields(batch))["script"]
        await slurm.submit(batch)
    child = await asyncio.create_subprocess_exec(
        *("bash", "-c", text),
        env={**os.environ, "SLURM_JOB_ID": str(job)},
        start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(patience(60.0)):
            while not (home / "signals" / str(job)).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            if words:
                slurm._write(job, words)
            return await child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


async def test_a_script_hears_by_file(socket: Path, tmp_path: Path) -> None:
    cases = [("USR1", None), ("USR2", None), ("left 1", None), ("", "1"), ("TERM\nUSR2", "5")]
    ended = await asyncio.gather(
        *(
            hears(socket.with_name(str(place)), tmp_path, place, words, limit)
            for place, (words, limit) in enumerate(cases)
        )
    )
    assert ended == [3, 4, 3, 3, 4]
