"""`rollyard logs` of a home on this machine, of a Slurm bridge, and of pods behind a scripted kubectl."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from rollyard.commands import logs
from rollyard.commands.logs import FollowedLog
from rollyard.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the logs of the home that commands use."""
    for name in ("ROLLYARD_URL", "ROLLYARD_KUBERNETES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "home"))
    made = tmp_path / "home" / "logs"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*words: str) -> tuple[int, str, str]:
        status = main(["logs", *words])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return command


def write(folder: Path, name: str, text: str, age: float = 0.0) -> Path:
    path = folder / f"{name}.log"
    path.write_text(text)
    moment = time.time() - age
    os.utime(path, (moment, moment))
    return path


def stamped(age: float, text: str) -> str:
    moment = datetime.fromtimestamp(time.time() - age)
    return f"{moment:%Y-%m-%d %H:%M:%S},123 INFO rollyard: {text}\n"


def test_all_logs_are_listed(folder: Path, run: Run) -> None:
    write(folder, "control-plane", "x\n", age=5)
    write(folder, "a-b-0123abcd-worker-0", "", age=1)
    write(folder, "default-0123abcd-backend-1-77", "", age=2)
    rows = [line.split() for line in run()[1].splitlines()]
    assert [row[0] for row in rows[1:]] == [
        "a-b-0123abcd-worker-0",
        "default-0123abcd-backend-1-77",
        "control-plane",
    ]
    assert (rows[1][1], rows[2][1]) == ("rj/a-b", "bp/default")


def test_the_workers_of_a_job_and_the_backends_of_a_pool(folder: Path, run: Run) -> None:
    write(folder, "job-11111111-worker-0", "earlier\n", age=100)
    write(folder, "job-22222222-init-0", "of init\n", age=2)
    write(folder, "job-22222222-run-0", "of run\n", age=1)
    write(folder, "job-x-22222222-run-0", "of another\n")
    write(folder, "job-33333333-backend-0", "of the pool\n")
    assert run("job") == (
        0,
        "[job-22222222-init-0] of init\n[job-22222222-run-0] of run\n",
        "rollyard: 1 earlier logs of this name: `rollyard logs` lists them\n",
    )
    assert run("rj", "job", "--stage", "run")[1] == "of run\n"
    assert run("bp/job")[1] == "of the pool\n"
    assert run("worker/job-11111111-worker-0")[1] == "earlier\n"
    status, _, err = run("nobody")
    assert (status, "has no log of nobody; `rollyard logs` lists those" in err) == (1, True)


def test_the_log_of_a_long_name_is_found(folder: Path, run: Run) -> None:
    name = "n" * 63
    write(folder, f"{'n' * (63 - len('-22222222-worker-0'))}-22222222-worker-0", "here\n")
    assert run(name)[1] == "here\n"


def test_a_slurm_job_that_stood_ready_has_its_log_too(folder: Path, run: Run) -> None:
    line = "job-22222222-worker-1: Slurm job 41, which stood ready, works for it\n"
    write(folder, "bridge", line + line.replace("job-2", "other-2").replace("41", "42"))
    write(folder, "job-22222222-worker-0-40", "submitted for it\n")
    write(folder, "ready-00ff-41", "stood ready\n")
    write(folder, "ready-00fe-42", "for another\n")
    assert run("job")[1] == "[job-22222222-worker-0-40] submitted for it\n[ready-00ff-41] stood ready\n"


def test_the_last_lines_and_the_newer_ones(folder: Path, run: Run) -> None:
    old, new = stamped(7200, "old"), stamped(60, "new")
    traceback = "  | a line of a traceback\n"
    as_json = json.dumps({"time": datetime.fromtimestamp(time.time() - 30).astimezone().isoformat()}) + "\n"
    path = write(folder, "control-plane", new + traceback + as_json)
    path.with_name("control-plane.log.1").write_text(old + traceback)
    assert run("control-plane")[1] == old + traceback + new + traceback + as_json
    assert run("control-plane", "--tail", "1")[1] == as_json
    assert run("control-plane", "--tail=0")[1] == ""
    assert run("control-plane", "--since", "10m")[1] == new + traceback + as_json
    # A log without times is as old as its last change.
    write(folder, "plain", "no time\n", age=3600)
    status, out, err = run("plain", "--since=1m")
    assert (status, out) == (0, "")
    assert err.endswith("plain.log has no lines to show\n")
    assert run("plain", "--since=2h")[1] == "no time\n"


def test_a_followed_log_goes_on_when_it_was_full(folder: Path) -> None:
    path = write(folder, "a", "before\n")
    with closing(FollowedLog(path, path.stat().st_size)) as log:
        assert list(log.lines()) == []
        with path.open("a") as file:
            file.write("one\r\ntw")
        assert list(log.lines()) == [b"one"]
        with path.open("a") as file:
            file.write("o\n")
        path.replace(path.with_name("a.log.1"))
        path.write_text("three\n")
        assert list(log.lines()) == [b"two", b"three"]


def test_following_finds_the_logs_of_later_workers(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(folder, "job-22222222-worker-0", "start\n")
    steps = iter(
        (
            lambda: first.write_text("start\nmore\n"),
            lambda: write(folder, "job-22222222-worker-1", "later\n"),
            lambda: None,
        )
    )

    def sleep(_seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(logs, "time", SimpleNamespace(sleep=sleep, time=time.time))
    status, out, _ = run("job", "-f")
    assert (status, out) == (130, "start\nmore\n[job-22222222-worker-1] later\n")


def test_what_has_no_log_here_is_said(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = run("sandbox/job-aa-0-1")
    assert (status, "`rollyard view JOB job-aa-0-1`" in err) == (2, True)
    assert "'node' has no logs" in run("node/x")[2]
    assert "--stage goes with JOB" in run("bp/x", "--stage", "run")[2]
    assert "is not a name" in run("worker/..")[2]
    elsewhere = "the logs of http://far:8765 are on the machine where it runs"
    assert elsewhere in run("job", "--url", "http://far:8765")[2]
    monkeypatch.setenv("ROLLYARD_URL", "http://far:8765")
    assert elsewhere in run("job")[2]
    # The server of this home is the one that is named.
    (folder.parent / "context.json").write_text(json.dumps({"url": "http://far:8765"}))
    write(folder, "job-22222222-worker-0", "here\n")
    assert run("job")[1] == "here\n"
    monkeypatch.delenv("ROLLYARD_URL")
    monkeypatch.setenv("PATH", str(folder))
    assert "has no logs, because nothing has run there" in run("--home", str(folder / "none"))[2]


KUBECTL = """#!/bin/sh
if [ "$1" = get ]; then cat "$STATE"; exit; fi
if [ "$1" = config ]; then echo mine; exit; fi
for word in "$@"; do echo "$word"; done
echo 'No resources found in mine namespace.' >&2
case "$*" in *refused*) echo 'error: pods "refused" not found' >&2; exit 1;; esac
"""


def test_in_a_cluster_kubectl_reads_the_logs_of_pods(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    service = {
        "metadata": {"namespace": "rollouts", "name": "api", "labels": {"app.kubernetes.io/instance": "r"}},
        "spec": {"ports": [{"name": "http", "port": 1}]},
    }
    (tmp_path / "state").write_text(json.dumps({"items": [service]}))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path / "state"))

    def asked(*words: str) -> list[str]:
        status, out, err = run("--kubernetes=rollouts", *words)
        assert (status, err) == (0, "rollyard: No resources found in mine namespace.\n")
        return out.splitlines()

    common = ["--all-containers", "--prefix", "--tail=200", "--max-log-requests=64"]
    component = "app.kubernetes.io/component"
    assert asked("control-plane") == [
        *("logs", "--namespace", "rollouts", "--selector"),
        *(f"app.kubernetes.io/instance=r,{component}=api", *common),
    ]
    assert asked("job", "--stage", "run", "-f", "--since", "2m") == [
        *("logs", "--namespace", "mine", "--selector"),
        f"rollyard.dev/job=job,{component}=stage-worker,rollyard.dev/stage in (run,init-run-eval)",
        *(*common, "--since=120s", "--follow"),
    ]
    assert asked("bp/p", "-n", "other", "--tail", "-1")[1:5] == [
        *("--namespace", "other", "--selector"),
        f"rollyard.dev/pool=p,{component}=backend",
    ]
    assert asked("worker/pod-1")[3] == "pod-1"
    status, _, err = run("--kubernetes", "worker/refused")
    assert (status, err) == (1, 'rollyard: pods "refused" not found\n')
    assert run("--kubernetes")[0] == 2
