"""tokens.json: several tokens of a role at once, and a file that changes while the control plane runs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from rollyard_api.access.bearer_tokens import MAX_VALID, TokenFile, load
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Unauthorized
from rollyard_api.settings import Settings
from rollyard_crds.security.job_token import job_token
from rollyard_crds.security.ready_token import ready_token
from rollyard_testing.api.plane import serving
from rollyard_testing.waiting import eventually

OLD: dict[str, Any] = {"admin": "a", "worker": "w", "driver": "d"}


def replaced(path: Path, document: Any) -> None:
    """Write the file beside the old one and rename it, as the documentation says."""
    scratch = path.with_suffix(".new")
    scratch.write_text(document if isinstance(document, str) else json.dumps(document))
    scratch.replace(path)


def file_of(path: Path) -> TokenFile:
    return TokenFile(path.parent, path)


def role_of(file: TokenFile, token: str) -> str | None:
    try:
        return file.tokens.caller(f"Bearer {token}").role
    except Unauthorized:
        return None


def test_a_token_is_rotated_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    replaced(path, OLD)
    file = file_of(path)
    of_a_job = job_token("w", "default", "job", "uid")
    replaced(path, OLD | {"worker": ["new", "w"], "metrics": "m"})
    file.look()
    assert file.tokens.current("worker") == "new", "the first is handed out"
    assert [role_of(file, one) for one in ("new", "w", of_a_job, "m", "d")] == [
        "worker", "worker", "worker", "metrics", "driver",
    ]  # fmt: skip
    replaced(path, OLD | {"worker": "new"})
    file.look()
    assert [role_of(file, one) for one in ("new", "w", of_a_job, "m")] == ["worker", None, None, None]


def test_a_mounted_secret_is_swapped_by_its_link(tmp_path: Path) -> None:
    """Kubelet makes a folder of the new version and points `..data` there."""
    for version, worker in (("..1", "w"), ("..2", "v")):
        (tmp_path / version).mkdir()
        # It has the same length and time, so only the file's identity tells them apart.
        (tmp_path / version / "tokens.json").write_text(json.dumps(OLD | {"worker": worker}))
        os.utime(tmp_path / version / "tokens.json", (1, 1))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "tokens.json").symlink_to("..data/tokens.json")
    file = file_of(tmp_path / "tokens.json")
    file.look()
    assert file.tokens.current("worker") == "w"
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").replace(tmp_path / "..data")
    file.look()
    assert file.tokens.current("worker") == "v"


@pytest.mark.parametrize(
    "broken",
    [None, "", "{",
     "[]", '{"admin": "a"}', json.dumps(OLD | {"worker": []}), json.dumps(OLD | {"worker": ["d"]}),
     json.dumps(OLD | {"worker": ["x", 7]}), "[" * 100_000, " " * 100_000],
    ids=range(10),
)  # fmt: skip
def test_a_broken_file_leaves_the_tokens_in_force(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """None stands for a file that is gone."""
    path = tmp_path / "given.json"
    replaced(path, OLD)
    file = file_of(path)
    file.look()
    if broken is None:
        path.unlink()
    else:
        replaced(path, broken)
    with caplog.at_level(logging.ERROR, "rollyard.api"):
        for _ in range(3):
            file.look()
    assert role_of(file, "w") == "worker"
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(path) in said
    assert "the tokens read before stay in force" in said
    assert '"x"' not in said, "no token goes into the log"
    replaced(path, OLD | {"worker": "new"})
    file.look()
    assert role_of(file, "new") == "worker"


def test_a_file_may_leave_out_the_roles_that_only_look(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(OLD))
    tokens = load(path)
    assert (tokens.current("admin"), tokens.current("worker"), tokens.current("driver")) == ("a", "w", "d")
    assert not {"metrics", "viewer"} & tokens.by_role.keys()


def test_tokens_of_a_role_are_bounded_and_of_one_role_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(OLD | {"worker": [f"w{i}" for i in range(MAX_VALID + 1)]}))
    with pytest.raises(OptionInvalid, match="at most 16 tokens of 'worker'"):
        load(path)
    path.write_text(json.dumps(OLD | {"metrics": ["m", "a"]}))
    with pytest.raises(OptionInvalid, match="the tokens of two roles are the same"):
        load(path)


@pytest.mark.parametrize("under", ["new", "old"])
def test_tokens_made_under_a_worker_token_that_is_being_retired_stay_valid(
    tmp_path: Path, under: str
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(OLD | {"worker": ["new", "old"]}))
    tokens = load(path)
    assert tokens.current("worker") == "new"
    job = tokens.caller(f"Bearer {job_token(under, 'team', 'a', 'u-1')}").job
    assert job is not None
    assert (job.namespace, job.name, job.uid) == ("team", "a", "u-1")
    ready = tokens.caller(f"Bearer {ready_token(under, 'team', 'w-1')}")
    assert (ready.role, ready.ready and ready.ready.worker, ready.job) == ("ready", "w-1", None)
    for other in ("a", "d"):
        with pytest.raises(Unauthorized):
            tokens.caller(f"Bearer {job_token(other, 'team', 'a', 'u-1')}")


async def test_a_running_control_plane_sees_the_change(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    async with serving(settings, tokens_seconds=0.02) as served:
        given = json.loads(path.read_text())
        replaced(path, given | {"worker": ["rotated", given["worker"]]})
        headers = {"Authorization": "Bearer rotated"}

        async def known() -> bool:
            answer = await served.anonymous.get("/v1/leases/job", params={"name": "x"}, headers=headers)
            return bool(answer.status_code == 404)

        await eventually(known)
        assert (await served.worker.get("/v1/leases/job", params={"name": "x"})).status_code == 404
        replaced(path, given | {"worker": "rotated"})

        async def refused() -> bool:
            answer = await served.worker.get("/v1/leases/job", params={"name": "x"})
            return bool(answer.status_code == 401)

        await eventually(refused)
        assert await known()
