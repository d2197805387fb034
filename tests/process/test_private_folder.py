"""Private folders: what another user of the machine has prepared is noticed, and not used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rollyard_process.private_folder import make_private_folder, open_private_folder

OTHER = 54_321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """Return a folder like /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def as_other(make: Callable[[], None], *paths: Path) -> None:
    make()
    for path in paths:
        os.chown(path, OTHER, OTHER, follow_symlinks=False)


def test_it_is_made_with_the_folders_on_the_way(public: Path) -> None:
    descriptor = open_private_folder(public / "a" / "b")
    try:
        assert os.path.samestat(os.fstat(descriptor), (public / "a" / "b").stat())
    finally:
        os.close(descriptor)
    assert [(public / name).stat().st_mode & 0o7777 for name in ("a", "a/b")] == [0o700, 0o700]
    make_private_folder(public / "a" / "b")


def test_an_open_folder_of_this_user_is_closed_to_others(public: Path) -> None:
    (public / "mine").mkdir(mode=0o755)
    make_private_folder(public / "mine")
    assert (public / "mine").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_on_the_way_that_others_may_write_to_is_refused(public: Path, mode: int) -> None:
    shared = public / "shared"
    shared.mkdir()
    shared.chmod(mode)
    os.chown(shared, -1, OTHER) if os.geteuid() == 0 else None
    if os.geteuid() != 0 and mode == 0o775:
        pytest.skip("the group may be this user's own")
    with pytest.raises(PermissionError, match="can be written by others"):
        make_private_folder(shared / "mine")
    assert not (shared / "mine").exists()


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(public: Path) -> None:
    victim = public / "ry-0-abcd"
    as_other(victim.mkdir, victim)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        make_private_folder(victim)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}"):
        make_private_folder(victim / "node")
    assert list(victim.iterdir()) == []


@needs_root
@pytest.mark.parametrize("below", ["", "node"])
def test_a_link_of_another_user_is_not_followed(public: Path, tmp_path: Path, below: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    link = public / "ry-0-abcd"
    as_other(lambda: link.symlink_to(secret), link)
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private_folder(link / below)
    assert list(secret.iterdir()) == []


@pytest.mark.attack(
    "links of others behind links of the user, circles, files",
    boundary="node",
    surface="run folder, in Python",
    stopped_by="each folder is opened from the root on, without following what is not trusted",
)
@needs_root
def test_a_link_of_another_user_behind_a_link_of_this_one_is_not_followed(
    public: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o700)
    evil = public / "evil"
    as_other(lambda: evil.symlink_to(secret), evil)
    (tmp_path / "scratch").symlink_to(evil)
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private_folder(tmp_path / "scratch" / "mine")
    assert list(secret.iterdir()) == []


def test_links_of_this_user_on_the_way_are_followed(public: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (public / "relative").symlink_to("../absolute")
    make_private_folder(public / "relative" / "mine")
    assert (tmp_path / "real" / "mine").is_dir()
    (public / "last").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private_folder(public / "last")


def test_links_in_a_circle_end(public: Path) -> None:
    (public / "a").symlink_to("b")
    (public / "b").symlink_to("a")
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private_folder(public / "a" / "mine")


def test_a_file_in_its_place_is_an_error(public: Path) -> None:
    (public / "file").write_text("kept")
    with pytest.raises(OSError, match="file"):
        make_private_folder(public / "file")
    assert (public / "file").read_text() == "kept"
