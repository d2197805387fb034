"""A worker that stands ready: how it asks for its assignment, what it takes from it, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_crds.workers import Assignment, AssignmentRequest
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
from rollyard_pipeline.errors import ControlPlaneRefused, PipelineError
from rollyard_pipeline.program import NODE_UNUSABLE, StopSignals, assigned_options, assignment_of, parse
from rollyard_testing.pace import patience

READY = ["--url", "http://127.0.0.1:9", "--token-file", "/t", "--namespace", "team", "--ready", "r-1"]
ARGUMENTS = [
    "--job",
    "math",
    "--namespace",
    "team",
    "--stages",
    "run",
    "--concurrency",
    "run=3",
    "--name",
    "w.u",
]


def assignment(*arguments: str, job: str = "math") -> Assignment:
    return Assignment(namespace="team", job=job, arguments=list(arguments or ARGUMENTS), token="ry-job.x")


class Plane:
    """A control plane that gives these answers in turn."""

    def __init__(self, *answers: Assignment | Exception | None) -> None:
        self.answers = list(answers)
        self.asked: list[AssignmentRequest] = []

    async def assignment(self, request: AssignmentRequest) -> Assignment | None:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_it_asks_until_it_is_assigned() -> None:
    plane = Plane(None, ControlPlaneUnavailable("starts", 0.01), None, assignment())
    assert await assignment_of(plane, "team", "r-1", "kubernetes") == assignment()
    assert {(one.namespace, one.worker, one.driver) for one in plane.asked} == {("team", "r-1", "kubernetes")}
    assert all(one.wait > 0 for one in plane.asked), "each request is a long poll"


async def test_a_spent_token_ends_it() -> None:
    plane = Plane(None, ControlPlaneRefused("AssignmentTaken"))
    with pytest.raises(ControlPlaneRefused):
        await assignment_of(plane, "team", "r-1", "kubernetes")


def test_an_assignment_shows_no_token() -> None:
    assert "ry-job" not in repr(assignment())


def test_the_arguments_make_it_a_worker_of_the_job() -> None:
    options = assigned_options(parse([*READY, "--drain-seconds", "22"]), assignment())
    assert (options.job, options.stages, options.concurrency) == ("math", "run", "run=3")
    assert (options.name, options.drain_seconds, options.url) == ("w.u", 22.0, "http://127.0.0.1:9")


@pytest.mark.attack(
    "an assignment moves a worker to another control plane, token file or kind of sandbox",
    boundary="worker",
    surface="ready worker",
    stopped_by="such arguments are refused",
)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://elsewhere"], "may not change --url"),
        (["--token-file", "/etc/shadow"], "may not change --token-file"),
        (["--sandbox", "process"], "may not change --sandbox"),
        (["--run-dir", "/"], "may not change --run-dir"),
        (["--namespace", "other"], "name job math in namespace other"),
        (["--job", "another"], "name job another in namespace team"),
        (["--no-such-option"], "not known here: --no-such-option"),
        (["--drain-seconds", "soon"], "cannot be used"),
    ],
)
def test_an_assignment_with_other_arguments_is_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(PipelineError, match=says) as refused:
        assigned_options(parse(READY), assignment(*ARGUMENTS, *arguments))
    assert refused.value.reason == "InvalidOption"


@pytest.fixture
def stop_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGINT after the test as before it. A worker ignores both as its process ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("stop_signals")
@pytest.mark.parametrize("before", [False, True], ids=["during it", "before it"])
async def test_a_signal_ends_the_wait(before: bool) -> None:
    with StopSignals() as signals:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        if before:
            await asyncio.sleep(0)
        assert await asyncio.wait_for(signals.wait(asyncio.sleep(3600)), patience(30)) is None


def test_the_process_ends_when_it_is_asked_to_although_nobody_answers(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    silent = socket.create_server(("127.0.0.1", 0))
    silent.settimeout(patience(60))
    with silent:
        given = [
            "--url",
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            "--token-file",
            str(tmp_path / "token"),
        ]
        process = subprocess.Popen([sys.executable, "-m", "rollyard_pipeline", *READY, *given])
        try:
            request, _ = silent.accept()
            with request:
                process.send_signal(signal.SIGTERM)
                assert process.wait(patience(60)) == 0
        finally:
            process.kill()
            process.wait(patience(60))


def test_on_a_node_without_sandboxes_it_ends_before_a_job_takes_it(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    env = {**os.environ, "PATH": str(tmp_path)}
    # The path of a socket is short, and the test's own folder may not be.
    with tempfile.TemporaryDirectory(prefix="ry-") as short:
        given = ["--token-file", str(tmp_path / "token"), "--run-dir", short]
        command = [sys.executable, "-m", "rollyard_pipeline", *READY, *given, "--sandbox", "bubblewrap"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == NODE_UNUSABLE, done.stderr
    assert "BubblewrapMissing" in done.stderr
