"""Submitting a job whose tasks are in a file of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from rollyard.commands import resources
from rollyard.errors import InvalidInput, LookupFailed
from rollyard.jobs.manifests import read_manifests
from rollyard.jobs.running import submit_job
from rollyard.main import main
from rollyard_client import Client, Conflict, Invalid
from rollyard_crds import RolloutJob
from rollyard_crds.fields.plugins import UsedPlugin
from rollyard_crds.rolloutjob import MAX_AGENT_FILE, MAX_INLINE_TASKS
from rollyard_testing.manifests import job_manifest


class Elsewhere:
    """A control plane on another machine, which reads no file of this one, and keeps by name what it took."""

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, Any]] = {}
        self.files: list[Path] = []

    def upload(self, path: Path, namespace: str) -> str:
        self.files.append(path)
        return f"blob:sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

    def submit(self, job: RolloutJob) -> RolloutJob:
        spec = job.spec.to_json()
        if self.taken.setdefault(job.metadata.name, spec) != spec:
            raise Conflict("exists with another spec", reason="AlreadyExists", status=409)
        if job.spec.tasks.url is not None and not job.spec.tasks.url.startswith("blob:"):
            del self.taken[job.metadata.name]
            text = f"spec.tasks.url: {job.spec.tasks.url} cannot be read: no such file"
            raise Invalid(text, reason="InvalidTasks", status=422, errors=[text])
        return job


def job_of(path: Path, handler: str = "math") -> RolloutJob:
    spec = {"tasks": {"url": path.as_uri()}, "handler": handler, "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "job"}, "spec": spec})


def task_file(folder: Path, count: int) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{i}", "prompt": "?"}) + "\n" for i in range(count)))
    return path


def test_a_file_is_uploaded(tmp_path: Path) -> None:
    server, path = Elsewhere(), task_file(tmp_path, MAX_INLINE_TASKS + 1)
    for _ in range(2):
        job = submit_job(cast(Client, server), job_of(path))
        assert (job.spec.tasks.url or "").startswith("blob:sha256:")
    assert server.files == [path, path]
    path.write_text('{"id": "other", "prompt": "?"}\n')
    with pytest.raises(Conflict, match="another spec"):
        submit_job(cast(Client, server), job_of(path))


def test_faults_name_the_file(tmp_path: Path) -> None:
    class Refusing(Elsewhere):
        def submit(self, job: RolloutJob) -> RolloutJob:
            text = f"spec.tasks.url: {job.spec.tasks.url}: line 3: prompt: is wrong"
            raise Invalid(text, reason="InvalidTasks", status=422, errors=[text])

    path = task_file(tmp_path, 3)
    with pytest.raises(Invalid) as refused:
        submit_job(cast(Client, Refusing()), job_of(path))
    assert refused.value.errors == [f"spec.tasks.url: {path.as_uri()}: line 3: prompt: is wrong"]
    assert str(refused.value) == refused.value.errors[0]


def test_a_file_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        submit_job(cast(Client, Elsewhere()), job_of(tmp_path / "neither-here.jsonl"))


def test_uploads_are_of_the_jobs_namespace_and_of_both_files(tmp_path: Path) -> None:
    class Named(Elsewhere):
        namespaces: ClassVar[list[str]] = []

        def upload(self, path: Path, namespace: str) -> str:
            self.namespaces.append(namespace)
            return super().upload(path, namespace)

    path, specs = task_file(tmp_path, 3), tmp_path / "specs.json"
    specs.write_text("{}")
    given = job_of(path).to_json()
    given["metadata"]["namespace"] = "team"
    given["spec"]["tasks"] |= {"format": "swebench", "specs": specs.as_uri()}
    server = Named()
    job = submit_job(cast(Client, server), RolloutJob.model_validate(given))
    assert (server.files, server.namespaces) == ([path, specs], ["team", "team"])
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (path, specs)]
    tasks = job.spec.tasks
    assert [tasks.url, tasks.specs] == [f"blob:sha256:{one}" for one in hashes]
    assert (tasks.format, job.metadata.namespace) == ("swebench", "team")
    specs.unlink()
    with pytest.raises(InvalidInput, match=r"spec\.tasks\.specs: .*specs\.json: "):
        submit_job(cast(Client, Named()), RolloutJob.model_validate(given))


def test_a_job_that_is_submitted_again_says_what_it_does_not_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Known(Elsewhere):
        namespace = "default"

        def job(self, name: str, namespace: str) -> RolloutJob:
            job = job_of(path)
            job.status.plugins = [UsedPlugin(file="mine.py", sha256="0" * 64, edited=True)]
            return job

        def submit(self, job: RolloutJob) -> RolloutJob:
            if job.spec.handler != "math":
                text = "RolloutJob 'job' exists with another spec; delete it first or choose another name"
                raise Conflict(text, reason="AlreadyExists", status=409)
            return self.job("job", "default")

    path = task_file(tmp_path, 1)
    monkeypatch.setattr(resources, "connect", lambda *_: contextlib.nullcontext(Known()))
    for handler, status, words in (
        ("math", 0, "mine.py has changed since; this job keeps the text that it was submitted with"),
        ("stem", 1, "choose another name (--name NEW)"),
    ):
        manifest = job_of(path, handler).model_dump(mode="json", by_alias=True, exclude_none=True)
        (tmp_path / "job.json").write_text(json.dumps(manifest))
        assert main(["submit", "-f", str(tmp_path / "job.json")]) == status
        assert words in capsys.readouterr().err


def test_the_texts_of_a_harness_come_from_files_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("print('ü')\r\n", newline="")
    files = {"agent.py": "file:agent.py", "plain.txt": "a text"}
    agent = {"type": "harness", "harness": "command", "command": "x", "files": files}
    path = tmp_path / "job.yaml"
    spec = {"tasks": {"stream": True}, "handler": "shell", "backendRef": {"name": "p"}, "agent": agent}
    path.write_text(json.dumps(job_manifest("own", spec)))
    (job,) = read_manifests(path)
    assert isinstance(job, RolloutJob)
    assert job.spec.agent.files == {"agent.py": "print('ü')\r\n", "plain.txt": "a text"}
    (tmp_path / "agent.py").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"spec\.agent\.files\.agent\.py: .*agent\.py: not UTF-8 text"):
        read_manifests(path)
    (tmp_path / "agent.py").write_text("x" * (MAX_AGENT_FILE + 1))
    with pytest.raises(InvalidInput, match=r"agent\.py: more than 262144 characters"):
        read_manifests(path)
    (tmp_path / "agent.py").unlink()
    with pytest.raises(LookupFailed, match=r"spec\.agent\.files\.agent\.py: .*No such file"):
        read_manifests(path)
