"""Jobs that are submitted with their tasks: files of this machine, lists, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard import AsyncClient, Client, RolloutJob, Task, errors
from rollyard_client.submission import INLINE_BYTES, INLINE_TASKS, prepared
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.manifests import job_manifest


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    with a_control_plane(tmp_path_factory.mktemp("api"), ready_seconds=50, end_seconds=20) as started:
        yield started


@pytest.fixture
def client(server: StartedControlPlane) -> Iterator[Client]:
    with Client(server.url, server.tokens["admin"]) as made:
        yield made


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"t{number}", "prompt": "p"} for number in range(count)]


def job(name: str, **tasks: Any) -> dict[str, Any]:
    spec: dict[str, Any] = {"handler": "shell", "agent": {"type": "oracle"}}
    return job_manifest(name, spec | ({"tasks": tasks} if tasks else {}))


def written(folder: Path, name: str, **tasks: Any) -> Path:
    """Write a job to a file, and return the file."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job(name, **tasks)))
    return path


def lines(folder: Path, documents: list[dict[str, Any]]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


async def test_files_of_both_are_submitted_once(
    client: Client, server: StartedControlPlane, tmp_path: Path
) -> None:
    manifest, tasks = written(tmp_path, "files"), lines(tmp_path, rows(3))
    first = client.submit(manifest, tasks=tasks)
    assert (first.spec.tasks.url or "").startswith("blob:sha256:")
    assert first.status.counts.total == 3
    assert client.submit(str(manifest), str(tasks)).metadata.uid == first.metadata.uid
    async with AsyncClient(server.url, server.tokens["admin"]) as other:
        again = await other.submit(manifest, tasks=tasks)
        assert again.metadata.uid == first.metadata.uid
        tasks.write_text('{"id": "another", "prompt": "p"}\n')
        with pytest.raises(errors.Conflict):
            await other.submit(manifest, tasks=tasks)


def test_what_a_file_names_beside_it_is_uploaded(client: Client, tmp_path: Path) -> None:
    tasks = lines(tmp_path, rows(2))
    found = client.submit(written(tmp_path, "beside", url="tasks.jsonl"))
    assert found.status.counts.total == 2
    # To name the same file once more is no contradiction.
    assert client.submit(tmp_path / "job.yaml", tasks=tasks).metadata.uid == found.metadata.uid


def test_a_list_is_a_part_of_the_job_or_is_uploaded(client: Client) -> None:
    mixed = [Task(id="model", prompt="p"), *rows(2)]
    short = client.submit(job("short"), tasks=mixed)
    assert [task.id for task in short.spec.tasks.inline or ()] == ["model", "t0", "t1"]
    assert client.submit(job("short"), tasks=iter(mixed)).metadata.uid == short.metadata.uid
    for name, tasks, options in (
        ("many", rows(INLINE_TASKS + 1), {}),
        ("large", [{"id": "t", "prompt": "p" * INLINE_BYTES}], {}),
        ("other-format", [{"problem": "3 + 4", "answer": "7"}], {"format": "math"}),
        ("tolerant", rows(2), {"onBadRow": "skip"}),
    ):
        found = client.submit(job(name, **options), tasks=tasks)
        assert (found.spec.tasks.inline, found.status.counts.total) == (None, len(tasks))


def test_faults_name_file_line_and_field(client: Client, tmp_path: Path) -> None:
    wrong = [*rows(1), {"id": "x", "prompt": "p", "promptt": "p"}]
    file = lines(tmp_path, wrong)
    for given, place in ((file, f"{file}: line 2"), ([*rows(300), *wrong[1:]], "tasks: line 301")):
        with pytest.raises(errors.Invalid) as refused:
            client.submit(job("wrong"), tasks=given)
        assert f"{place}: promptt: unknown field" in refused.value.errors[0]
        assert "blob:" not in str(refused.value)
    with pytest.raises(errors.Invalid, match=r"spec\.tasks\.inline\[1\]\.promptt: unknown field"):
        client.submit(job("wrong"), tasks=wrong)
    with pytest.raises(errors.Invalid) as misspelt:
        client.submit({**job("wrong"), "spec": {"handlerr": "shell"}}, tasks=rows(1))
    assert "spec.handlerr: unknown field; did you mean 'handler'?" in misspelt.value.errors


def test_a_file_that_is_no_job_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text, problem in (
        ("kind: RolloutJob\nspec: {a: [}", "not valid YAML: line 2, column 12"),
        ("", "must hold one RolloutJob (got 0 documents)"),
        ("{}\n---\n{}", "must hold one RolloutJob (got 2 documents)"),
        ("kind: BackendPool", "kind: must be RolloutJob (got 'BackendPool')"),
    ):
        path.write_text(text)
        with pytest.raises(errors.Invalid) as refused:
            prepared(path, None, "default")
        assert str(refused.value).startswith(f"{path}: {problem}")
    path.write_bytes(b" " * ((16 << 20) + 1))
    with pytest.raises(errors.Invalid, match="larger than 16 MiB"):
        prepared(path, None, "default")


@pytest.mark.parametrize(
    ("source", "tasks", "problem"),
    [
        ({"stream": True}, rows(1), "spec.tasks.stream: a stream takes its tasks by push_tasks"),
        ({"inline": rows(1)}, rows(1), "spec.tasks.inline: names other tasks"),
        ({"url": "https://x/y.jsonl"}, "tasks.jsonl", "spec.tasks.url: names other tasks"),
        ({"url": "file:///nowhere/else.jsonl"}, "tasks.jsonl", "spec.tasks.url: names other tasks"),
        ({}, [], "tasks: the list is empty"),
        ({}, {"id": "t"}, "tasks: must be a list of tasks, or the path of a file (got dict)"),
        ({}, 7, "tasks: must be a list of tasks, or the path of a file (got int)"),
        ({}, ["t"], "tasks[0]: must be a Task or a mapping (got str)"),
        ({}, [*rows(1), {"id": {1, 2}}], "tasks[1]: cannot be sent as JSON"),
        ({}, ".", "spec.tasks.url: . is a folder, which only the format 'harbor' reads"),
        ({"format": "harbor"}, ".", "spec.tasks.url: .: there is no task folder"),
    ],
)
def test_tasks_that_cannot_be_sent_are_refused(
    source: dict[str, Any], tasks: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(errors.Invalid) as refused:
        prepared(job("j", **source), tasks, "default")
    assert str(refused.value).startswith(problem)
    assert list(tmp_path.iterdir()) == [], "nothing half-made stays"


def test_a_file_that_is_missing_is_an_error_of_the_system(client: Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        client.submit(job("missing"), tasks=tmp_path / "nowhere.jsonl")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        client.submit(tmp_path / "nowhere.yaml")


def test_the_given_job_stays_as_it_is(tmp_path: Path) -> None:
    given = job("j", limit=5)
    before = json.dumps(given)
    folder = tmp_path / "set" / "one"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text("")
    with prepared(given, rows(1), "mine") as submission:
        assert submission.source == {"limit": 5, "inline": rows(1)}
        assert submission.namespace == "mine"
    with prepared(job("j", format="harbor"), tmp_path / "set", "mine") as submission:
        packed = submission.files["url"]
        assert (packed.shown, packed.path.is_file()) == (str(tmp_path / "set"), True)
    assert not packed.path.exists()
    with prepared(given, "s3://bucket/tasks.jsonl", "mine") as submission:
        assert (submission.source["url"], submission.files) == ("s3://bucket/tasks.jsonl", {})
    assert json.dumps(given) == before
    model = RolloutJob.model_validate(job("j", stream=True))
    with prepared(model, None, "mine") as submission:
        assert (submission.source["stream"], submission.namespace) == (True, "mine")
