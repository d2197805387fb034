"""The settings of git repositories are put back as they were, whatever has become of the folders."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rollyard_sandbox.errors import FileError
from rollyard_sandbox.server import git_settings
from rollyard_sandbox.server.git_settings import GitSettings

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="this machine has no git")


def git(folder: Path, *words: str) -> str:
    """Run git without settings of this machine's, and return what it prints."""
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    argv = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, env=variables).stdout


def hostile(repository: Path) -> None:
    """Let a repository's settings start programs in several ways."""
    with (repository / "config").open("a") as file:
        file.write("[diff]\n\texternal = /x\n")
    (repository / "info").mkdir(exist_ok=True)
    (repository / "info/attributes").write_text("* diff=x\n")
    (repository / "hooks").mkdir(exist_ok=True)
    (repository / "hooks/pre-commit").write_text("#!/bin/sh\n")


def state(repository: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of the files with settings."""
    names = ["config", "config.worktree", "commondir", "info/attributes"]
    names += [f"hooks/{path.name}" for path in repository.glob("hooks/*") if path.suffix != ".sample"]
    paths = {name: repository / name for name in names}
    return {n: (p.stat().st_mode, p.read_bytes()) for n, p in paths.items() if p.exists()}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with settings of all kinds, a submodule and a worktree."""
    git(tmp_path, "init", "-q", "part")
    git(tmp_path / "part", "commit", "-q", "--allow-empty", "-m", "a")
    git(tmp_path, "init", "-q", "repo")
    folder = tmp_path / "repo"
    git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", "../part", "part")
    git(folder, "commit", "-q", "-m", "a")
    git(folder, "worktree", "add", "-q", "../tree")
    git(folder, "config", "alias.x", "!true")
    (folder / ".git/info/attributes").write_text("*.bin -diff\n")
    hook = folder / ".git/hooks/post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\n")
    hook.chmod(0o755)
    return folder


def test_settings_are_those_of_init(tmp_path: Path, repository: Path) -> None:
    places = [
        repository / ".git", repository / ".git/modules/part", repository / ".git/worktrees/tree",
        tmp_path / "part/.git",
    ]  # fmt: skip
    before = [state(place) for place in places]
    files = {path: path.read_bytes() for path in (tmp_path / "tree/.git", repository / "part/.git")}
    settings = GitSettings(str(tmp_path), own_folders=False)
    settings.record([])
    for place in places:
        hostile(place)
    (places[0] / "hooks/post-commit").unlink()
    (places[0] / "info/attributes").unlink()
    (places[0] / "info/attributes").symlink_to("/etc/passwd")
    (places[2] / "commondir").write_text(str(tmp_path / "part/.git"))
    for path in files:
        path.write_text("gitdir: /nowhere")
    settings.put_back()
    assert [state(place) for place in places] == before
    assert {path: path.read_bytes() for path in files} == files
    assert git(repository, "status", "--short") == git(tmp_path / "tree", "status", "--short") == ""


def test_a_repository_that_nothing_has_changed_is_not_written_to(tmp_path: Path, repository: Path) -> None:
    settings = GitSettings(str(tmp_path), own_folders=False)
    settings.record([])
    before = {path: os.lstat(path).st_ctime_ns for path in tmp_path.rglob("*")}
    settings.put_back()
    assert {path: os.lstat(path).st_ctime_ns for path in tmp_path.rglob("*")} == before


def test_a_repository_of_run_keeps_what_git_needs(tmp_path: Path) -> None:
    settings = GitSettings(str(tmp_path), own_folders=False)
    settings.record([])
    git(tmp_path, "init", "-q", "--object-format=sha256", "new")
    git(tmp_path / "new", "commit", "-q", "--allow-empty", "-m", "a")
    git(tmp_path / "new", "worktree", "add", "-q", "../tree")
    hostile(tmp_path / "new/.git")
    settings.put_back()
    assert "external" not in (tmp_path / "new/.git/config").read_text()
    assert state(tmp_path / "new/.git").keys() == {"config"}
    for folder in ("new", "tree"):
        assert len(git(tmp_path / folder, "rev-parse", "HEAD").strip()) == 64
        assert git(tmp_path / folder, "config", "diff.external", "own") == ""


def test_repositories_of_further_folders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may write there where a sandbox has these folders for itself."""
    monkeypatch.setattr(git_settings, "_SHARED", (str(tmp_path / "shared"),))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    names = ("work", "shared", "home", "tmp", "further")
    for name in names:
        git(tmp_path, "init", "-q", name)
    before = [state(tmp_path / name / ".git") for name in names]
    settings = GitSettings(str(tmp_path / "work"), own_folders=True)
    settings.record([str(tmp_path / "further")])
    for name in names:
        hostile(tmp_path / name / ".git")
    settings.put_back()
    assert [state(tmp_path / name / ".git") for name in names] == before


ENDLESS_SEARCH = pytest.mark.attack(
    "the search for repositories is made endless, or led away by links, special files and deep folders",
    boundary="evaluation",
    surface="Eval's git",
    stopped_by="it follows no link, and beyond 200,000 folders or the longest path the policy gets 0",
)


@ENDLESS_SEARCH
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "unreadable"])
def test_settings_of_another_kind_are_replaced(tmp_path: Path, kind: str) -> None:
    git(tmp_path, "init", "-q", "repo")
    repository = tmp_path / "repo/.git"
    before = state(repository)
    settings = GitSettings(str(tmp_path), own_folders=False)
    settings.record([])
    for name in ("config", "hooks", "info"):
        path = repository / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if kind == "link":
            path.symlink_to(tmp_path)
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
            (path / "attributes").mkdir()
        if kind == "unreadable":
            path.chmod(0)
    if kind == "unreadable":
        repository.chmod(0o111)
    settings.put_back()
    assert state(repository) == before
    assert (repository / "hooks").is_dir()
    assert (repository / "info").is_dir()


@ENDLESS_SEARCH
def test_too_many_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = GitSettings(str(tmp_path), own_folders=False)
    settings.record([])
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    settings.put_back()
    for limit in ("MAX_FOLDERS", "MAX_ENTRIES"):
        with monkeypatch.context() as patch:
            patch.setattr(git_settings, limit, 10)
            for refused in (settings.put_back, lambda: settings.record([])):
                with pytest.raises(FileError) as caught:
                    refused()
                assert caught.value.reason == "TooManyEntries"


@ENDLESS_SEARCH
def test_a_folder_that_no_path_reaches_is_refused(tmp_path: Path) -> None:
    """A program can still work there, and nothing could be put back."""
    settings = GitSettings(str(tmp_path), own_folders=False)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(30):
            os.mkdir("x" * 200, dir_fd=descriptor)
            inner = os.open("x" * 200, os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        with pytest.raises(FileError) as caught:
            settings.put_back()
        assert caught.value.reason == "NameTooLong"
    finally:
        os.close(descriptor)


def test_settings_that_are_too_large_to_keep_are_refused(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "repo")
    (tmp_path / "repo/.git/config").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(FileError) as caught:
        GitSettings(str(tmp_path), own_folders=False).record([])
    assert (caught.value.reason, "repo/.git/config" in str(caught.value)) == ("FileTooLarge", True)
