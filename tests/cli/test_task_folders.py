"""`rollyard validate` and `rollyard submit` with task folders, and reference solutions that are played."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from rollyard.errors import InvalidInput
from rollyard.jobs.manifests import folder_warnings, read_manifests
from rollyard.jobs.running import submit_job
from rollyard.main import main
from rollyard_client import Client
from rollyard_crds import RolloutJob
from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.task_list import TaskListError, parse_lines
from rollyard_testing.manifests import job_manifest
from rollyard_testing.sandboxes.rootfolder import make_image

EXAMPLES = Path(__file__).parents[2] / "examples/harbor"


class Server:
    """A control plane that keeps what is uploaded."""

    def __init__(self) -> None:
        self.uploads: list[bytes] = []

    def upload(self, path: Path, namespace: str) -> str:
        self.uploads.append(path.read_bytes())
        return "blob:sha256:" + "0" * 64

    def submit(self, job: RolloutJob) -> RolloutJob:
        return job


def test_the_example_is_packed_and_uploaded() -> None:
    server = Server()
    (job,) = read_manifests(EXAMPLES / "job.yaml")
    assert isinstance(job, RolloutJob)
    for _ in range(2):
        sent = submit_job(cast(Client, server), job)
    assert sent.spec.tasks.url == "blob:sha256:" + "0" * 64
    first, second = server.uploads
    assert first == second
    tasks = parse_lines(gzip.decompress(first).decode().splitlines(), job.spec.tasks)
    assert [task.id for task in tasks] == ["planted", "separate", "single", "steps"]


def test_only_one_format_reads_a_folder(tmp_path: Path) -> None:
    spec = {"tasks": {"url": tmp_path.as_uri()}, "handler": "math", "agent": {"type": "oracle"}}
    job = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": spec})
    with pytest.raises(InvalidInput, match="is a folder, which only the format 'harbor' reads"):
        submit_job(cast(Client, Server()), job)


def test_folders_are_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", str(EXAMPLES / "job.yaml"), "-f", str(EXAMPLES / "tasks")]) == 0
    assert "4 tasks are valid" in capsys.readouterr().out
    assert main(["validate", "-f", str(EXAMPLES / "dockerfile")]) == 0
    assert "1 task" in capsys.readouterr().out
    assert main(["validate", "-f", str(tmp_path)]) == 1
    assert "there is no task folder" in capsys.readouterr().err
    shutil.copytree(EXAMPLES / "tasks/single", tmp_path / "a")
    (tmp_path / "a/task.toml").write_text("[agent]\ntimeout_sec = \n")
    (tmp_path / "b").mkdir()
    os.symlink("/etc/passwd", tmp_path / "b/task.toml")
    assert main(["validate", "-f", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "b: task.toml: is a symbolic link" in error


def test_folders_that_cannot_be_read_are_skipped_here_and_by_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        shutil.copytree(EXAMPLES / "tasks/single", tmp_path / "tasks" / name)
    (tmp_path / "tasks/a/task.toml").write_text("[agent]\ntimeout_sec = \n")
    os.symlink("/etc/passwd", tmp_path / "tasks/b/link")
    tasks = {"url": "tasks", "format": "harbor", "onBadRow": "skip"}
    spec = {"tasks": tasks, "handler": "harbor", "agent": {"type": "oracle"}}
    document = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": "j"}}
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**document, "spec": spec}))
    assert main(["validate", "-f", str(path)]) == 0
    said = capsys.readouterr().out
    assert "is valid (1 tasks, 1 samples each)\n" in said
    assert ": 2 of 3 rows of the task list are skipped:\n" in said
    assert ": folder 1: a: task.toml: is not TOML" in said
    assert ": folder 2: b: link: is a symbolic link, which a task folder must not hold\n" in said
    server = Server()
    (job,) = read_manifests(path)
    assert isinstance(job, RolloutJob)
    submit_job(cast(Client, server), job)
    skipped = SkippedRows()
    lines = gzip.decompress(server.uploads[0]).decode().splitlines()
    assert [task.id for task in parse_lines(lines, job.spec.tasks, skipped=skipped)] == ["c"]
    assert [reason.partition(": ")[2] for reason in skipped.reasons] == [
        line.partition(": folder ")[2].partition(": ")[2] for line in said.splitlines() if ": folder " in line
    ]
    job.spec.tasks.on_bad_row = None
    submit_job(cast(Client, server), job)
    lines = gzip.decompress(server.uploads[1]).decode().splitlines()
    with pytest.raises(TaskListError, match="b: link: is a symbolic link"):
        parse_lines(lines, job.spec.tasks)


def test_a_broken_file_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(EXAMPLES / "tasks/single", tmp_path / "a")
    (tmp_path / "a/task.toml").write_text("[agent]\ntimeout_sec = \n")
    assert main(["validate", "-f", str(tmp_path)]) == 1
    assert "folder 1: a: task.toml: is not TOML: Invalid value (at line 2" in capsys.readouterr().err


def rows(path: Path, *tasks: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(path)


def answer(text: str) -> dict[str, Any]:
    return {"name": "submit", "arguments": {"answer": text}}


def test_reference_solutions_are_played(
    bubblewrap_works: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = {"id": "right", "prompt": "q", "test_script": "true", "solution": [answer("4")]}
    wrong = {**right, "id": "wrong", "test_script": '[ "$ROLLYARD_ANSWER" = 5 ]'}
    without = {"id": "without", "prompt": "q", "test_script": "true"}
    broken = {**right, "id": "broken", "sandbox": {"setup": "exit 3"}}
    options = ["--oracle", "--handler", "shell"]
    assert main(["validate", "-f", rows(tmp_path / "good.jsonl", right, without), *options]) == 0
    assert "1 reference solutions get the reward 1; 1 tasks have none" in capsys.readouterr().out
    assert main(["validate", "-f", rows(tmp_path / "bad.jsonl", right, wrong, broken), *options]) == 1
    error = capsys.readouterr().err
    assert "task 'wrong': its reference solution got the reward 0.0" in error
    assert "task 'broken': SetupFailed: " in error
    assert "task 'right'" not in error


def test_the_examples_solutions_are_played(
    bubblewrap_works: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "-f", str(EXAMPLES / "job.yaml"), "--oracle"]) == 0
    assert "4 reference solutions get the reward 1" in capsys.readouterr().out


def test_nothing_to_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = rows(tmp_path / "t.jsonl", {"id": "a", "prompt": "q", "answer": "1"})
    assert main(["validate", "-f", path, "--handler", "math", "--oracle"]) != 0
    assert "no task has a reference solution" in capsys.readouterr().err
    assert main(["validate", "-f", path, "--oracle"]) != 0
    assert "--oracle needs a manifest, or --handler" in capsys.readouterr().err
    assert main(["validate", "-f", path, "--handler", "unscored", "--oracle"]) != 0
    assert "--oracle has no reward to look at" in capsys.readouterr().err


PUBLISHED = """
version = "1.0"
artifacts = []
[task]
name = "example/total"
keywords = ["files"]
[[task.authors]]
name = "Nobody"
[metadata]
author_name = "Nobody"
difficulty = "easy"
category = "file-operations"
tags = ["files"]
expert_time_estimate_min = 5.0
junior_time_estimate_min = 15.0
[verifier]
timeout_sec = 60.0
[agent]
timeout_secs = 60.0
user = "root"
[environment]
build_timeout_sec = 600.0
docker_image = "example/total:20251031"
cpus = 1
memory = "128M"
storage = "8M"
gpus = 0
allow_internet = true
mcp_servers = []
[verifier.env]
[environment.env]
[solution.env]
"""
PUBLISHED_FILES = {
    "task.toml": PUBLISHED,
    "instruction.md": "Write the sum of the numbers in /app/numbers.txt into /tmp/total.txt.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\nCOPY numbers.txt .\n",
    "environment/numbers.txt": "20\n22\n",
    "solution/solve.sh": "#!/bin/bash\n"
    "{ read -r one; read -r two; } < numbers.txt\necho $((one + two)) > /tmp/total.txt\n",
    "tests/test_outputs.sh": '[ "$(cat /tmp/total.txt)" = 42 ]\n',
    "tests/test.sh": """#!/bin/bash
if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set."
    exit 1
fi
bash /tests/test_outputs.sh
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
""",
}


def test_a_folder_in_the_published_layout(
    bubblewrap_works: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused until the job says what becomes of its network and its user. Then it can be solved."""
    for name, text in PUBLISHED_FILES.items():
        path = tmp_path / "tasks/total" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    image = make_image(tmp_path / "image")
    (image / "app").mkdir()
    shutil.copy(tmp_path / "tasks/total/environment/numbers.txt", image / "app")
    spec: dict[str, Any] = {
        "tasks": {"url": "tasks", "format": "harbor"},
        "handler": "harbor",
        "agent": {"type": "oracle"},
        "sandbox": {"images": {"example/total:20251031": str(image)}, "warm": 0},
    }
    manifest = tmp_path / "job.json"

    def validate(**options: str) -> int:
        spec["tasks"]["harbor"] = options
        job = job_manifest("j", spec)
        manifest.write_text(json.dumps(job))
        return main(["validate", "-f", str(manifest), "--oracle"])

    assert validate() == 1
    assert "total: agent.user: all programs of a sandbox run as one user" in capsys.readouterr().err
    assert validate(user="ignore") == 1
    assert "tasks.harbor.network: ignore or allow" in capsys.readouterr().err
    assert validate(user="ignore", network="allow") == 1
    assert "'tasks.harbor.network: allow' needs 'sandbox.network: allowlist'" in capsys.readouterr().err
    assert validate(user="ignore", network="ignore") == 0
    out = capsys.readouterr().out
    assert "1 reference solutions get the reward 1" in out
    assert "'total': agent.timeout_secs (did you mean agent.timeout_sec?)" in out
    assert "'total': agent.user, environment.allow_internet" in out
    spec["sandbox"]["resources"] = {"disk": "4Mi"}
    assert validate(user="ignore", network="ignore") == 1
    assert "task 'total': environment.storage_mb of its task.toml asks for more" in capsys.readouterr().err
    del spec["sandbox"]["resources"]
    (image / "app/numbers.txt").write_text("1\n1\n")
    assert validate(user="ignore", network="ignore") == 1
    assert "its reference solution got the reward 0.0" in capsys.readouterr().err


def test_a_submitted_folder_is_warned_about(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(EXAMPLES / "tasks/single", tmp_path / name)
    with (tmp_path / "b/task.toml").open("a") as file:
        file.write("disk_mb = 5\n")
    source = TaskSource(url=tmp_path.as_uri(), format="harbor")
    assert folder_warnings(tmp_path, source) == [
        "task folders whose task.toml has keys that are not known here and have no effect: 1. The first is "
        "'b': environment.disk_mb"
    ]
    (tmp_path / "b/task.toml").write_text("?")
    assert folder_warnings(tmp_path, source) == []
