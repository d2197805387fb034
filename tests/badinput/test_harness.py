"""Harnesses that misbehave, in real sandboxes: one that never ends, a daemon, calls after the end."""

from __future__ import annotations

import json

import pytest
import yaml
from rich.console import Console
from rollyard.quickstart.run import QuickstartOptions, run
from rollyard.trajectories.reading import read_file
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.manifests import job_manifest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap_works")]

PROGRAM = """
import json, os, signal, subprocess, sys, time, urllib.request

FOLDER = os.environ["ROLLYARD_HARNESS"]
messages = json.load(open(f"{FOLDER}/messages.json"))
prompt = messages[-1]["content"]


def ask(text):
    said = [*messages, {"role": "user", "content": text}]
    body = json.dumps({"model": "any", "messages": said}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20).status


print("first call:", ask("one"), flush=True)
if prompt == "never":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            print("further call:", ask("two"), flush=True)
        except OSError as error:
            print("refused:", error.code, json.load(error)["error"]["message"], flush=True)
        time.sleep(0.5)
if prompt == "daemon":
    loop = "while true; do echo beat >> beat; sleep 0.02; done"
    subprocess.Popen(["setsid", "sh", "-c", loop], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not os.path.exists("beat"):
        time.sleep(0.02)
if prompt == "late":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            parent = os.getppid()
            for number in range(1_000_000):
                try:
                    ask(f"late {number}")
                except OSError as error:
                    with open("late", "a") as file:
                        file.write(f"{error}\\n")
        os._exit(0)
    time.sleep(0.5)
"""
STILL = 'a=$(wc -l < beat) && [ "$a" -gt 0 ] && sleep 0.5 && [ "$a" = "$(wc -l < beat)" ]'
TASKS = [
    {"id": "never", "prompt": "never", "test_script": "true"},
    {"id": "daemon", "prompt": "daemon", "test_script": STILL},
    {"id": "late", "prompt": "late", "test_script": "true"},
]  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trajectory]:
    """Return the trajectory of each task."""
    folder = tmp_path_factory.mktemp("b")
    (folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in TASKS))
    spec = {
        "tasks": {"url": "tasks.jsonl"},
        "handler": "shell",
        "agent": {
            "type": "harness",
            "harness": "command",
            "command": '/.rollyard/venv/bin/python "$ROLLYARD_HARNESS/agent.py"',
            "files": {"agent.py": PROGRAM},
            "maxTurns": 64,
            "maxContextTokens": 1024,
        },
        "sampling": {"maxTokens": 64},
        "backendRef": {"name": "default"},
        "sandbox": {"resources": {"memory": "256Mi", "disk": "16Mi", "processes": 64}, "warm": 0},
        "stages": {"run": {"timeoutSeconds": 8}, "eval": {"sandbox": "shared"}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job_manifest("misbehaving", spec)))
    options = QuickstartOptions(
        job=folder / "job.yaml", home=folder / "home", out=folder / "out", tasks=len(TASKS), samples=1
    )
    run(options, Console(quiet=True))
    return {one.task_id: one for one in read_file(folder / "out" / "trajectories.jsonl")}


def test_one_that_never_ends_is_cut_and_evaluated(ended: dict[str, Trajectory]) -> None:
    trajectory = ended["never"]
    record = trajectory.harness
    assert record is not None
    assert (trajectory.truncated_reason, trajectory.reward) == ("RunTimeout", 1.0)
    assert record.exit_code is None
    assert record.output.startswith("first call: 200\nfurther call: 200\n")
    # The same call again is no further turn, and when the time is up it is an error of the protocol.
    assert len(trajectory.turns) == 1
    assert "refused: 400 the time of this rollout is used up" in record.output
    assert 8 <= record.seconds < 60


def test_a_daemon_is_gone_when_the_tests_run(ended: dict[str, Trajectory]) -> None:
    trajectory = ended["daemon"]
    assert trajectory.harness is not None
    assert (trajectory.harness.exit_code, trajectory.reward, trajectory.truncated) == (0, 1.0, False)


def test_calls_after_the_end_are_not_answered(ended: dict[str, Trajectory]) -> None:
    trajectory = ended["late"]
    record = trajectory.harness
    assert record is not None
    assert (record.exit_code, trajectory.reward) == (0, 1.0)
    # What was asked in time is recorded, and the rest neither holds Run up nor is sampled.
    assert trajectory.timings.run.active_seconds < 8
    turns = len(trajectory.turns) + sum(len(branch.turns) for branch in trajectory.branches)
    assert 1 <= turns <= 64
