"""Files that only their user may read, in folders of the same kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_drivers.host.private_files import write_private


@pytest.fixture(params=[0o000, 0o022, 0o077])
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def modes(path: Path) -> tuple[int, int]:
    return path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777


def test_a_token_is_its_users_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    path = tmp_path / "tokens" / "team.math"
    for text in ("first", "a longer second one", "3"):
        write_private(path, text)
        assert path.read_text() == text
        assert modes(path) == (0o700, 0o600)
        assert [one.name for one in path.parent.iterdir()] == ["team.math"]


def test_another_text_replaces_a_file_that_others_could_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first")
    path.chmod(0o644)
    inode = path.stat().st_ino
    write_private(path, "second")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("second", 0o600)
    assert path.stat().st_ino != inode, "who has opened the old one does not read the new token"


def test_a_file_that_holds_the_text_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_private(path, "same")
    before = path.stat()
    write_private(path, "same")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_link_is_replaced_and_what_it_names_is_kept(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("of somebody else")
    path = tmp_path / "token"
    path.symlink_to(other)
    write_private(path, "mine")
    assert not path.is_symlink()
    assert (path.read_text(), other.read_text()) == ("mine", "of somebody else")
    # Nor is a link followed that stands where the text is written first.
    (tmp_path / f".second.{os.getpid()}").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        write_private(tmp_path / "second", "mine")
    assert other.read_text() == "of somebody else"


def test_what_an_interrupted_write_left_behind_makes_no_file_readable(tmp_path: Path) -> None:
    left = tmp_path / f".token.{os.getpid()}"
    left.write_text("a longer text of before")
    left.chmod(0o644)
    write_private(tmp_path / "token", "mine")
    assert (tmp_path / "token").read_text() == "mine"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert not left.exists()
