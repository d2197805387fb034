"""`rollyard try` plays one task once, shows it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rollyard import terminal
from rollyard.errors import CliError, InvalidInput
from rollyard.jobs import trial
from rollyard.main import main
from rollyard_crds import RolloutJob
from rollyard_crds.base import Condition
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.checkout import ROOT
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

PAGE = (ROOT / "docs/first-task.md").read_text()
TASKS: list[dict[str, Any]] = [
    {"id": "one", "prompt": "x", "test_script": "true"},
    {"id": "two", "prompt": "y", "test_script": "true"},
]
SPEC: dict[str, Any] = {
    "tasks": {"url": "tasks.jsonl"},
    "handler": "shell",
    "backendRef": {"name": "policy"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with a job and its tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in TASKS))
    (tmp_path / "job.json").write_text(json.dumps(job_manifest("j", SPEC)))
    return tmp_path


def job(folder: Path, **spec: Any) -> Path:
    path = folder / "other.json"
    path.write_text(json.dumps(job_manifest("j", SPEC | spec)))
    return path


def of(
    path: Path, task: str | None = None, handler: str | None = None, *, in_pool: bool = False
) -> RolloutJob:
    return trial.trial_of(path, task, handler, None, (), 60, in_pool=in_pool)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list that takes the arguments of each `rollyard up` that would have been started."""
    calls: list[list[str]] = []

    @contextlib.contextmanager
    def instead(home: object, arguments: list[str]) -> Iterator[None]:
        calls.append(arguments)
        raise CliError("started")
        yield

    monkeypatch.setattr(trial, "running_up", instead)
    return calls


def test_a_trial_is_the_job_with_one_task_that_is_played_once(folder: Path) -> None:
    path = job(
        folder,
        samplesPerTask=8,
        dynamicSampling={"targetGroups": 4},
        stages={"run": {"replicas": 3, "maxAttempts": 5, "timeoutSeconds": 77}},
        suspend=True,
    )
    spec = of(path, "two").spec
    assert [task.id for task in spec.tasks.inline or ()] == ["two"]
    assert (spec.samples_per_task, spec.dynamic_sampling, spec.suspend) == (1, None, False)
    run = spec.stages.run
    assert (run.replicas, run.max_attempts, run.timeout_seconds) == (1, 1, 77)
    assert (spec.backoff_limit, spec.active_deadline_seconds) == (0, 60)
    assert spec.ttl_seconds_after_finished == trial.KEPT_SECONDS


def test_the_first_task_is_the_default_and_a_list_needs_a_handler(folder: Path) -> None:
    assert [task.id for task in of(folder / "job.json").spec.tasks.inline or ()] == ["one"]
    bare = of(folder / "tasks.jsonl", "two", "shell").spec
    assert ([task.id for task in bare.tasks.inline or ()], bare.handler) == (["two"], "shell")


def test_a_control_plane_may_offer_what_is_not_installed_here(folder: Path) -> None:
    path = job(folder, handler="theirs")
    with pytest.raises(InvalidInput, match="no handler 'theirs' is installed"):
        of(path)
    assert of(path, in_pool=True).spec.handler == "theirs"


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        ("none.json", 1, "none.json: No such file or directory"),
        ("job.json --task three", 1, "--task three: no such task among 2, which begin with one, two"),
        ("tasks.jsonl", 2, "tasks.jsonl: a task list needs --handler, such as `--handler shell`"),
        ("tasks.jsonl --handler none", 1, "spec.handler: no handler 'none' is installed; installed: code,"),
        ("tasks.jsonl --handler none", 1, "; what a file of yours offers needs --plugin FILE"),
        ("tasks.jsonl --handler math", 1, "tasks.jsonl: task 'one': answer: required by the handler 'math'"),
        ("job.json --handler shell", 2, "--handler and --format are for a bare task list"),
        ("broken.jsonl --handler shell", 1, "broken.jsonl: line 1: task: give exactly one of"),
        ("stream.json", 1, "spec.tasks: the tasks are not on this machine"),
        ("two.json", 1, "two.json: must hold one RolloutJob, and holds 2"),
        ("job.json --pool p --backend http://x", 2, "--backend is for a trial on this machine"),
        ("job.json --pool p --plugin x.py", 2, "--plugin is for a trial on this machine"),
        ("job.json --tokenizer x", 2, "--tokenizer goes with --backend"),
        ("job.json --url http://x", 2, "--url, --kubernetes, --home and --namespace go with --pool"),
        ("job.json --plugin none.py", 1, "--plugin none.py: cannot be read: No such file or directory"),
        ("job.json --plugin nothing.py", 1, "--plugin nothing.py: offers nothing"),
        (
            "tasks.jsonl --handler mine --plugin importing.py",
            1,
            "No module named 'nosuch' (importing.py, line 2)",
        ),
        ("tasks.jsonl --handler mine --plugin checking.py", 1, "KeyError: 'a' (checking.py, line 4)"),
        ("job.json --timeout 0", 2, "0 is not in the range"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    words: str,
    status: int,
    problem: str,
    folder: Path,
    started: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = "from rollyard_pipeline.handlers import Handler\n"
    (folder / "nothing.py").write_text("x = 1\n")
    (folder / "importing.py").write_text(f"{handler}import nosuch\nclass MineHandler(Handler): ...\n")
    (folder / "checking.py").write_text(
        f"{handler}class MineHandler(Handler):\n"
        "    def check(self, task):\n        return {}['a']\n    async def eval(self, ctx): ...\n"
    )
    (folder / "broken.jsonl").write_text('{"id": "a"}\n')
    stream = job_manifest("j", SPEC | {"tasks": {"stream": True}})
    (folder / "stream.json").write_text(json.dumps(stream))
    (folder / "two.json").write_text(f"{json.dumps(stream)}\n---\n{json.dumps(stream)}")
    assert main(["try", *words.split()]) == status
    assert problem in capsys.readouterr().err
    assert started == []


def test_options_reach_what_is_started(folder: Path, started: list[list[str]]) -> None:
    words = ["--backend", "http://gpu:8000", "--tokenizer", "t", "--sandbox", "process"]
    assert main(["try", "job.json", *words]) == 1
    assert started == [["--sandbox", "process", "--backend", "http://gpu:8000", "--tokenizer", "t"]]


def record(**fields: Any) -> Trajectory:
    document = {"id": "r", "job": "j", "task_id": "one", "group_id": "one", "sample_index": 0}
    return Trajectory.model_validate(document | fields)


def test_what_the_infrastructure_failed_at_is_the_error(folder: Path) -> None:
    shown = io.StringIO()
    console = terminal.console(file=shown, width=200, color_system=None)
    failed = record(
        status="failed", reason="SetupFailed", message="sandbox.setup exited with 3: no such file"
    )
    with pytest.raises(CliError, match="the rollout has no reward: SetupFailed, see above"):
        trial.show(failed, of(folder / "job.json"), console)
    assert "failed, SetupFailed: sandbox.setup exited with 3: no such file" in shown.getvalue()


@pytest.mark.parametrize(
    ("reason", "more"), [("BackoffLimitExceeded", ""), ("DeadlineExceeded", "; --timeout gives it more time")]
)
def test_of_a_job_that_ended_early_the_message_is_the_error(folder: Path, reason: str, more: str) -> None:
    ended = of(folder / "job.json")
    ended.status.message = "the worker exited with 73 (BubblewrapMissing)"
    now = datetime.now(UTC)
    ended.status.conditions = [
        Condition(type="Failed", status="True", reason=reason, last_transition_time=now)
    ]
    console = terminal.console(file=io.StringIO())
    with pytest.raises(CliError, match=rf"no reward: the worker .* 73 \(BubblewrapMissing\){more}$"):
        trial.show(record(status="cancelled", reason="Cancelled"), ended, console)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder in which the temporary home is made. Its path is short, as Unix sockets need it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="try") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("ROLLYARD_HOME", f"{folder}/home")
        yield Path(folder)


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollyard", *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=patience(120),
        stdin=subprocess.DEVNULL,
    )


def left(temporary: Path) -> list[str]:
    """Return what a trial has left behind. The library of the engine leaves a file of its own."""
    return [name for name in os.listdir(temporary) if name.startswith("rollyard")]


def without_numbers(text: str) -> list[str]:
    """Return the lines that do not depend on how fast a machine is, and how it rounds."""
    lines = [re.sub(r"  \d+\.\d+ s$", "", line) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(("── turn ", "init ", "run ", "eval "))]


@pytest.mark.usefixtures("bubblewrap_works")
def test_the_tiny_policy_plays_the_first_task(tmp_path: Path, temporary: Path) -> None:
    """The folder of `rollyard init` works as it is, and the page shows what happens."""
    (shown,) = re.findall(r"<!-- output: rollyard (try .*?) -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert run(tmp_path, "init", "my-tasks").returncode == 0
    done = run(tmp_path / "my-tasks", *shown[0].split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert left(temporary) == []
    lines = iter(without_numbers(done.stdout))
    assert [line for line in shown[1].splitlines() if line not in lines] == [], done.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("bubblewrap_works")
def test_a_sandbox_that_cannot_start_is_the_error(folder: Path, temporary: Path) -> None:
    program = folder / "bin/bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'bwrap: no permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    done = run(folder, "try", "job.json", PATH=f"{program.parent}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "rollyard: the rollout has no reward: " in done.stderr
    assert "no permissions to create a new namespace" in done.stderr
    assert "The worker's log ends with:\n  │ rollyard worker: BubblewrapMissing" in done.stdout
    assert left(temporary) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("bubblewrap_works")
def test_ctrl_c_leaves_nothing(folder: Path, temporary: Path) -> None:
    """The task waits in its setup, so the signal comes in the middle of it."""
    waiting = {"id": "w", "prompt": "x", "test_script": "true", "sandbox": {"setup": "sleep 600"}}
    (folder / "tasks.jsonl").write_text(json.dumps(waiting))
    command = [sys.executable, "-m", "rollyard", "try", "job.json"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(60)) == 130
        said = process.stderr.read()
    assert first == b"Task w against the tiny policy\n"
    assert said.endswith(b"Interrupted; everything that it started is removed\n\n")
    assert left(temporary) == []
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    assert [command for command in commands if str(temporary).encode() in command] == []


def readable(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(path.read_bytes())
    return False


@pytest.mark.nightly
@pytest.mark.usefixtures("bubblewrap_works")
def test_a_pool_plays_it_as_a_job_that_is_deleted(folder: Path, temporary: Path) -> None:
    assert run(folder, "up", "--port", "0", "--detach").returncode == 0
    try:
        done = run(folder, "try", "job.json", "--pool", "default")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.match(r"Task one in the pool default, as the job try-[0-9a-f]{8}\n", done.stdout)
        assert "task one, sample 0: succeeded, reward 1" in done.stdout
        assert json.loads(run(folder, "get", "rj", "-o", "json").stdout)["items"] == []
        missing = run(folder, "try", "job.json", "--pool", "none")
        assert (missing.returncode, missing.stdout) == (1, "")
        assert "'none'" in missing.stderr
    finally:
        run(folder, "down")
