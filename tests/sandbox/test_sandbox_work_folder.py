"""Operations below the work folder, on trees that a hostile program has left."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.client.work_folder import TreeEntry, WorkFolder, parse_tree
from rollyard_sandbox.errors import BadRequest, FileError, ProtocolError
from rollyard_sandbox.frames import MAX_TREE
from rollyard_testing.pace import patience


@pytest.fixture
def work(server: Any) -> Path:
    folder: Path = server.work
    return folder


@pytest.fixture
def folder(client: ExecClient) -> WorkFolder:
    return client.work_folder()


async def test_a_tree_tells_kinds_and_follows_nothing(work: Path, folder: WorkFolder) -> None:
    (work / "a").mkdir()
    (work / "a" / "x").write_bytes(b"12345")
    (work / "a" / "run").write_bytes(b"")
    (work / "a" / "run").chmod(0o4755)
    (work / "out").symlink_to("/etc")
    (work / "loop").symlink_to(".")
    os.mkfifo(work / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work / "sock"))
    strange = b"new\nline \xff\xfe"
    (work / os.fsdecode(strange)).write_bytes(b"1")
    with (work / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    expected = {
        b"a": TreeEntry("folder"),
        b"a/run": TreeEntry("file", executable=True),
        b"a/x": TreeEntry("file", size=5),
        b"fifo": TreeEntry("other"),
        b"loop": TreeEntry("link", target=b"."),
        strange: TreeEntry("file", size=1),
        b"out": TreeEntry("link", target=b"/etc"),
        b"sock": TreeEntry("other"),
        b"sparse": TreeEntry("file", size=1 << 40),
    }
    assert await folder.tree() == expected
    assert await folder.tree(b"a") == {k: v for k, v in expected.items() if k.split(b"/")[0] == b"a"}
    assert await folder.tree(b"out") == {b"out": expected[b"out"]}
    assert await folder.read(strange, max_bytes=9) == b"1"
    assert await folder.digests([(strange, 0, 1), (b"a/x", 1, 2), (b"gone", 0, 1)]) == [
        hashlib.sha256(b"1").digest(), hashlib.sha256(b"23").digest(), bytes(32),
    ]  # fmt: skip


@pytest.mark.parametrize("path", [b"out/passwd", b"loop/a", b"loop/loop/a"])
async def test_no_path_leads_through_a_link(work: Path, folder: WorkFolder, path: bytes) -> None:
    (work / "a").write_bytes(b"1")
    (work / "out").symlink_to("/etc")
    (work / "loop").symlink_to(".")
    for attempt in (folder.tree(path), folder.read(path, max_bytes=100)):
        with pytest.raises(FileError) as caught:
            await attempt
        assert caught.value.reason in ("NotADirectory", "SymlinkLoop")


@pytest.mark.parametrize("path", [b"../x", b"/etc/passwd", b"a/../../x", b"a//b", b"./a", b""])
async def test_a_path_stays_below_the_work_folder(folder: WorkFolder, path: bytes) -> None:
    with pytest.raises(BadRequest, match="path"):
        await folder.put(path, b"x", mode=0o644)
    with pytest.raises(BadRequest, match="path"):
        await folder.remove([path])
    with pytest.raises(BadRequest, match="path"):
        await folder.make([path])


async def test_no_file_is_opened_that_is_none(work: Path, folder: WorkFolder) -> None:
    os.mkfifo(work / "fifo")
    (work / "link").symlink_to("fifo")
    for path in (b"fifo", b"link"):
        async with asyncio.timeout(patience(10)):
            with pytest.raises(FileError) as caught:
                await folder.read(path, max_bytes=10)
        assert caught.value.reason == "NotAFile"


async def test_what_is_put_replaces_whatever_is_there(work: Path, folder: WorkFolder, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "kept").write_text("kept")
    (work / "folder" / "deep").mkdir(parents=True)
    (work / "link").symlink_to(tmp_path / "kept")
    (work / "way").symlink_to(tmp_path / "inner")
    (work / "flat").write_text("x")
    await folder.put(b"folder", b"1", mode=0o755)
    await folder.put(b"link", b"2", mode=0o644)
    await folder.put(b"way/to/it", b"3", mode=0o644)
    await folder.put(b"flat/now/deep", b"4", mode=0o644)
    (work / "last").symlink_to("/nowhere")
    await folder.make([b"new/empty", b"flat/now", b"last"])
    assert (work / "folder").read_bytes() == b"1"
    assert os.access(work / "folder", os.X_OK)
    assert (work / "link").read_bytes() == b"2"
    assert (work / "way" / "to" / "it").read_bytes() == b"3"
    assert (work / "flat" / "now" / "deep").read_bytes() == b"4"
    assert (work / "new" / "empty").is_dir()
    assert (work / "last").is_dir()
    assert not (work / "last").is_symlink()
    assert (tmp_path / "kept").read_text() == "kept"
    assert os.listdir(tmp_path / "inner") == []
    await folder.remove([b"flat", b"last", b"gone", b"way/gone", b"link/x"])
    assert sorted(os.listdir(work)) == ["folder", "link", "new", "way"]


async def test_a_tree_is_bounded(work: Path, folder: WorkFolder) -> None:
    deep = work
    for _ in range(66):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(FileError) as caught:
        await folder.tree()
    assert caught.value.reason == "TooManyEntries"
    assert await folder.tree(b"d/d/d")
    (work / "wide").mkdir()
    for number in range(MAX_TREE + 1):
        os.mkdir(work / "wide" / str(number))
    with pytest.raises(FileError) as caught:
        await folder.tree(b"wide")
    assert caught.value.reason == "TooManyEntries"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
async def test_a_folder_that_may_not_be_read_is_named(work: Path, folder: WorkFolder) -> None:
    (work / "shut").mkdir(mode=0o000)
    assert await folder.tree() == {b"shut": TreeEntry("unreadable")}


@pytest.mark.attack(
    "a listing with forged paths or without end",
    boundary="evaluation",
    surface="answers of a stolen exec server",
    stopped_by="each record and the length are checked",
)
@pytest.mark.parametrize(
    "body",
    [
        b"f 0 1 ../x\0",
        b"f 0 1 /etc/passwd\0",
        b"f 0 1 a/../../x\0",
        b"f 0 -1 a\0",
        b"f 0 " + b"9" * 40 + b" a\0",
        b"f 2 1 a\0",
        b"x 0 1 a\0",
        b"f 0 1\0",
        b"\0" * (2 * MAX_TREE + 3),
        b"f 0 1 " + b"a" * (9 << 20) + b"\0",
    ],
)  # fmt: skip
def test_a_listing_that_a_stolen_server_might_send_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_tree(body)


def test_a_listing_keeps_to_what_was_asked_for() -> None:
    assert parse_tree(b"f 0 1 a/b\0", b"a") == {b"a/b": TreeEntry("file", size=1)}
    with pytest.raises(ProtocolError):
        parse_tree(b"f 0 1 ab\0", b"a")


async def test_a_folder_elsewhere(client: ExecClient, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x").write_bytes(b"1")
    (tmp_path / "link").symlink_to("one")
    elsewhere = client.work_folder(str(tmp_path / "one"))
    assert await elsewhere.tree() == {b"x": TreeEntry("file", size=1)}
    await elsewhere.put(b"a/b", b"2", mode=0o644)
    assert await elsewhere.tree(b"a") == {b"a": TreeEntry("folder"), b"a/b": TreeEntry("file", size=1)}
    assert await elsewhere.read(b"a/b", max_bytes=9) == b"2"
    assert await elsewhere.digests([(b"x", 0, 1)]) == [hashlib.sha256(b"1").digest()]
    await elsewhere.make([b"c"])
    await elsewhere.remove([b"a", b"x"])
    assert os.listdir(tmp_path / "one") == ["c"]
    with pytest.raises(FileError, match="link"):
        await client.work_folder(str(tmp_path / "link")).tree(b"c")
    with pytest.raises(FileError):
        await client.work_folder(str(tmp_path / "none")).tree()
