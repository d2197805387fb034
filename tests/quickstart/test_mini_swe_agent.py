"""mini-swe-agent, unmodified, in a sandbox: what is delivered is what the engine has sampled, id for id."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rollyard.quickstart.run import QuickstartOptions, run
from rollyard.trajectories.reading import read_file
from rollyard_crds.trajectory import Trajectory, Turn
from rollyard_testing.manifests import job_manifest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.harnesses, pytest.mark.usefixtures("bubblewrap_works")]


def answer(text: str, command: str | None = None) -> str:
    """Return an answer of the model that calls mini's tool, if there is a command."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return text if command is None else f"{text}\n<tool_call>\n{call}\n</tool_call>"


COMMANDS = [
    "grep -c wagon meadow.txt",
    "grep -c wagon meadow.txt > count.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat count.txt",
]
BROKEN = "I think that I am done."
"""An answer without a call, which mini removes from its history."""
SCRIPT = [
    # The error of a removed answer stands in the prompt of the next one.
    {
        "contains": "No call, no work.",
        "answers": [answer("I write it down.", COMMANDS[1]), answer("Done.", COMMANDS[2])],
    },
    {"contains": "Count the wagons", "answers": [answer("I count them.", COMMANDS[0]), BROKEN]},
]
SHORT = {
    "agent": {"instance_template": "{{task}}"},
    "model": {"format_error_template": "No call, no work.", "observation_template": "{{output.output}}"},
}
"""The model of the tests has a context of 2,048 tokens, so mini gets short templates. It is made for that."""
TASK = {
    "id": "wagons",
    "prompt": "Count the wagons.",
    "sandbox": {"files": {"meadow.txt": "wagon 1\nbagel 2\nwagon 3\n"}},
    "test_script": '[ "$(cat count.txt)" = 2 ]',
}


@pytest.fixture(scope="module")
def tools() -> Path:
    """Return the folder with mini-swe-agent, which is made once."""
    made = subprocess.run([ROOT / "scripts/harness-env"], capture_output=True, text=True, check=True)
    return Path(made.stdout.strip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose path is short, as it holds sockets."""
    return tmp_path_factory.mktemp("m")


@pytest.fixture(scope="module")
def trajectory(folder: Path, tools: Path) -> Trajectory:
    """Return the one rollout that mini plays."""
    (folder / "script.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in SCRIPT))
    (folder / "tasks.jsonl").write_text(f"{json.dumps(TASK)}\n")
    spec = {
        "tasks": {"url": "tasks.jsonl"},
        "handler": "shell",
        "agent": {
            "type": "harness",
            "harness": "mini-swe-agent",
            "command": 'mini -c mini.yaml -c "$ROLLYARD_HARNESS/short.yaml"',
            "files": {"short.yaml": yaml.safe_dump(SHORT)},
            "maxTurns": 8,
        },
        "backendRef": {"name": "default"},
        "sandbox": {"resources": {"memory": "1Gi", "disk": "64Mi", "processes": 128}, "warm": 0},
        "stages": {"run": {"timeoutSeconds": 120}},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job_manifest("mini", spec)))
    engine = (f"--script={folder / 'script.jsonl'}", f"--log-samples={folder / 'samples.jsonl'}")
    further = ("--sandbox-tools", str(tools), *(f"--engine-arg={option}" for option in engine))
    options = QuickstartOptions(
        job=folder / "job.yaml", home=folder / "h", out=folder / "o", tasks=1, samples=1, backend=further
    )
    run(options, Console(quiet=True))
    (one,) = read_file(folder / "o" / "trajectories.jsonl")
    return one


def turns_of(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of all conversations."""
    return [*trajectory.turns, *(turn for branch in trajectory.branches for turn in branch.turns)]


def test_it_solves_the_task_and_its_own_trajectory_agrees(trajectory: Trajectory) -> None:
    record = trajectory.harness
    assert record is not None
    assert (record.name, record.exit_code, trajectory.reward) == ("mini-swe-agent", 0, 1.0), record.output
    own: list[dict[str, Any]] = [
        each for each in json.loads(record.log)["messages"] if each["role"] != "exit"
    ]
    assert [(each["role"], each["content"]) for each in own if each["role"] != "tool"] == [
        (each.role, each.content) for each in trajectory.messages if each.role != "tool"
    ]
    for command in COMMANDS:
        assert command in record.output
    calls = [call.arguments for turn in trajectory.turns for call in turn.tool_calls]
    assert calls == [{"command": command} for command in COMMANDS[1:]]  # The first one is in a branch.


def test_each_token_is_one_that_the_engine_has_sampled(trajectory: Trajectory, folder: Path) -> None:
    entries = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    # The readiness of a server is tried with a prompt of one token.
    logged = [entry for entry in entries if len(entry["prompt_ids"]) > 1]
    delivered = []
    for turn in turns_of(trajectory):
        segment = trajectory.segments[turn.segment]
        prompt = segment.prompt_ids + segment.response_ids[: turn.start]
        delivered.append((prompt, segment.response_ids[turn.start : turn.end]))
        assert all(segment.loss_mask[turn.start : turn.end])
    assert len(delivered) == 4
    assert sorted(delivered) == sorted((entry["prompt_ids"], entry["ids"]) for entry in logged)
    # Nothing but what was sampled is trained on.
    assert sum(map(sum, (segment.loss_mask for segment in trajectory.segments))) == sum(
        len(entry["ids"]) for entry in logged
    )


def test_the_answer_that_it_removed_is_in_a_branch_and_trained_on(trajectory: Trajectory) -> None:
    (branch,) = trajectory.branches
    assert (branch.kind, branch.trained, trajectory.continues) == ("main", True, branch.number)
    assert [each.content for each in branch.messages if each.role == "assistant"][-1] == BROKEN
    assert BROKEN not in [each.content for each in trajectory.messages]
