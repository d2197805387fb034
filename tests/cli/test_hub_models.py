"""`rollyard up --model OWNER/NAME`: from the download to a trajectory, and what it says without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollyard_testing.hub import Hub, HubModel, hub_server
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

ROOT = Path(__file__).parents[2]
TINY = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
HUGGING_FACE = ROOT / "examples" / "tiny-policy" / "hf"
Rollyard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.models["tiny/tiny-policy"] = HubModel(TINY)
        server.models["tiny/hf"] = HubModel(HUGGING_FACE)
        yield server


@pytest.fixture
def rollyard(hub: Hub, tmp_path: Path) -> Rollyard:
    """Return a function that runs a command on one home, with the hub's cache beside it."""

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rollyard", *arguments],
            env={**hub.environment(tmp_path / "cache"), "ROLLYARD_HOME": str(tmp_path / "h"), **env},
            capture_output=True,
            text=True,
            timeout=patience(90),
        )

    return run


UP = ("up", "--detach", "--port", "0", "--sandbox", "process")


def test_a_model_of_the_hub_serves_a_job(rollyard: Rollyard, hub: Hub, tmp_path: Path) -> None:
    job = {
        "tasks": {"inline": [{"id": "a", "prompt": "2 + 2 = ?", "answer": "4"}]},
        "handler": "math",
        "agent": {"type": "single_turn"},
        "sampling": {"maxTokens": 4},
        "backendRef": {"name": "default"},
    }
    (tmp_path / "job.json").write_text(json.dumps(job_manifest("sums", job)))
    started = rollyard(*UP, "--model", "tiny/tiny-policy")
    assert started.returncode == 0, started.stderr
    try:
        assert len(hub.downloads()) == len(set(hub.downloads())), "once, for the server and the workers"
        done = rollyard("submit", "-f", str(tmp_path / "job.json"), "--wait")
        assert done.returncode == 0, done.stdout + done.stderr
        written = rollyard("trajectories", "sums", "-o", str(tmp_path / "t.jsonl"))
        assert written.returncode == 0, written.stderr
        (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
        (segment,) = json.loads(line)["segments"]
        assert any(segment["loss_mask"]), "the model has sampled"
        hub.requests.clear()
        pool = rollyard("get", "bp", "default", "-o", "json")
        assert json.loads(pool.stdout)["spec"]["model"] == "tiny/tiny-policy"
    finally:
        assert rollyard("down").returncode == 0
    again = rollyard(*UP, "--model", "tiny/tiny-policy", HF_HUB_OFFLINE="1")
    assert rollyard("down").returncode == 0
    assert again.returncode == 0, again.stderr
    assert hub.requests == [], "what is there needs no network"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "tiny/none"), "has no model 'tiny/none': check the name; a private one needs HF_TOKEN"),
        (("--model", "tiny/hf@v9"), "tiny/hf has no revision 'v9'"),
        (
            ("--model", "./tiny/none"),
            "tiny/none is not a folder, and a model of the Hugging Face Hub",
        ),
        (
            ("--model", "tiny/hf", "--engine", "embedded"),
            "tiny/hf has no genai_config.json: the embedded",
        ),
        (("--model", "tiny/hf", "--vllm-python", "/nowhere/python"), "'/nowhere/python' is not a program"),
        (("--model", "tiny/hf"), "the command `vllm` is not on PATH"),
        (("--model", str(HUGGING_FACE)), "the command `vllm` is not on PATH"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    rollyard: Rollyard, hub: Hub, arguments: tuple[str, ...], words: str
) -> None:
    done = rollyard(*UP, *arguments, PATH="/usr/bin:/bin")
    assert done.returncode != 0
    assert words in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rollyard: ")
    assert "Traceback" not in done.stderr
