"""The carry-over from Run's sandbox to Eval's fresh one: named files, or all changes of a folder.

Every process of Run is dead when this module is used. What Run left is hostile nevertheless: its names,
sizes, links and special files are checked here, and no operation inside a sandbox follows a symbolic link.
Nothing that Run left is ever written to the worker's own disk. Only regular files and folders are carried,
and of a file's mode only whether the file is executable. Symbolic links are not carried, because a link
that Run made could lead a test to the answer that the test itself brings. Where Eval has a network, less is
carried (see `inert_files`): the functions then get a `LeftBehind`, to which they add what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from rollyard_crds.fields.eval_carry import EvalCarry, carried_path
from rollyard_sandbox.client import DirEntry, ExecClient
from rollyard_sandbox.client.work_folder import DIGEST_SIZE, TreeEntry, WorkFolder
from rollyard_sandbox.errors import FileError
from rollyard_sandbox.frames import MAX_DIGESTED

from rollyard_pipeline.errors import CarryRefused, PermanentFailure
from rollyard_pipeline.stages.inert_files import LeftBehind, read_by_itself

MAX_CARRIED: Final = 10_000
"""The largest number of files and folders that can be carried."""
MAX_ARTIFACTS: Final = 16 << 20
"""The largest size of all artifacts and their paths together, in bytes."""
_CHUNK: Final = 8 << 20  # The largest number of bytes in one read.
_RANGES: Final = 512  # The largest number of ranges in one request for digests.
_ABSENT: Final = ("FileNotFound", "NotADirectory", "SymlinkLoop", "PermissionDenied", "NotAFile")
"""The reasons why a file that Run left cannot be read. Such a file is not carried."""

Tree = Mapping[bytes, TreeEntry]


@dataclass(slots=True)
class Carried:
    """The changes to make in a fresh work folder. All paths are relative to that folder."""

    removed: list[bytes] = field(default_factory=list)
    """Paths that are removed first, with everything in them."""
    folders: list[bytes] = field(default_factory=list)
    files: list[tuple[bytes, bool, bytes]] = field(default_factory=list)
    """The path of each file, whether it is executable, and its content."""


async def take_files(run: WorkFolder, carry: EvalCarry, left: LeftBehind | None = None) -> Carried:
    """Return the named files and folders as Run left them.

    Files that are missing or cannot be read are left out. Where Eval has a network, `left` gets what stays
    behind for that.

    Raises:
        CarryRefused: The files are larger or more numerous than a carry allows.
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or (with a FileError) Run has damaged it.
    """
    carried, budget = Carried(), _Budget(carry.max_bytes)
    for name in _topmost(carried_path(name).encode("utf-8", "surrogateescape") for name in carry.files):
        carried.removed.append(name)
        try:
            tree: Tree = await run.tree(name)
        except FileError as error:
            if error.reason in _ABSENT:
                continue
            raise
        if left is not None:
            tree = _inert(tree, left, len(name))
        files = [path for path, entry in tree.items() if entry.kind == "file"]
        budget.count(tree)
        budget.add(tree[path].size for path in files)
        carried.folders += [path for path, entry in tree.items() if entry.kind == "folder"]
        for path in files:
            data = await _content(run, path, tree[path].size)
            if data is not None:
                carried.files.append((path, tree[path].executable, data))
    return carried


async def take_changes(
    run: WorkFolder,
    fresh: WorkFolder,
    max_bytes: int,
    protected: Callable[[bytes], bool] | None = None,
    left: LeftBehind | None = None,
) -> Carried:
    """Return what differs between Run's folder and that of a sandbox in which only Init has run.

    The difference is measured from the fresh folder only, so Run cannot influence the baseline.

    Args:
        run: Run's folder.
        fresh: The folder in the fresh sandbox.
        max_bytes: The limit of all changed files together, in bytes.
        protected: Whether a path stays as it is in the fresh folder, whatever Run did to it.
        left: Where Eval has a network, it gets what stays behind for that.

    Raises:
        CarryRefused: Run left files that cannot be read, or more than a carry allows.
        PermanentFailure: Init itself makes more entries than can be compared.
        rollyard_sandbox.errors.SandboxError: A sandbox failed, or (with a FileError) Run has damaged its own.
    """
    try:
        before: Tree = await fresh.tree()
    except FileError as error:
        raise PermanentFailure(
            f"stages.eval.carry.diff: the work folder after Init cannot be compared: {error}", "CarryUnusable"
        ) from error
    after: Tree = await run.tree()
    if protected is not None:
        before, after = _unprotected(before, after, protected)
    if left is not None:
        for path, entry in after.items():
            if read_by_itself(path) and before.get(path) != entry:
                left.add(path)
        before, after = _unprotected(before, after, read_by_itself)
    for path, entry in after.items():
        if entry.kind == "unreadable" and before.get(path) != entry:
            raise CarryRefused(f"the folder {shown(path)} cannot be read")
    # Links and folders that cannot be read stay where Init made them and Run did not touch them.
    entries = {
        path: entry
        for path, entry in after.items()
        if entry.kind in ("file", "folder") or (entry.kind != "other" and before.get(path) == entry)
    }
    removed = list(_topmost(path for path in before if path not in entries))
    same_size = [
        path
        for path, entry in entries.items()
        if entry.kind == "file" and (old := before.get(path)) is not None and old == entry
    ]
    equal = await _equal(run, fresh, [(path, entries[path].size) for path in same_size])
    changed = {
        path: entry
        for path, entry in entries.items()
        if path not in equal and (entry.kind == "file" or before.get(path) != entry)
    }
    budget = _Budget(max_bytes)
    budget.count(changed)
    budget.add(entry.size for entry in changed.values() if entry.kind == "file")
    carried = Carried(removed=removed)
    for path, entry in changed.items():
        if entry.kind == "folder":
            carried.folders.append(path)
            continue
        data = await _content(run, path, entry.size)
        if data is None:
            raise CarryRefused(f"the file {shown(path)} cannot be read")
        carried.files.append((path, entry.executable, data))
    return carried


def _inert(tree: Tree, left: LeftBehind, top: int) -> Tree:
    """Return a tree without what stays behind where Eval has a network.

    Args:
        top: The length of the path that the job names, which itself is carried.
    """
    inert = {}
    for path, entry in tree.items():
        if read_by_itself(path[top + 1 :]):
            left.add(path)
        else:
            inert[path] = entry
    return inert


def _unprotected(before: Tree, after: Tree, protected: Callable[[bytes], bool]) -> tuple[Tree, Tree]:
    """Return both trees without protected paths, and without what would change a folder that holds one."""
    protected_paths = {path for path in before if protected(path)}
    folders = {path[:at] for path in protected_paths for at in range(len(path)) if path[at : at + 1] == b"/"}
    stays = protected_paths | folders

    def rest(tree: Tree) -> Tree:
        return {path: entry for path, entry in tree.items() if path not in stays and not protected(path)}

    # Where Run has replaced such a folder by a file or a link, the folder stays. What was in it is
    # removed, as Run has removed it.
    return rest(before), rest(after)


async def put(fresh: WorkFolder, carried: Carried, left: LeftBehind | None = None) -> None:
    """Apply the changes to a fresh work folder. Where Eval has a network, no file of them can be executed.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or (with a FileError) it has no room or no
            place for what Run left.
    """
    await fresh.remove(carried.removed)
    await fresh.make(carried.folders)
    for path, executable, data in carried.files:
        await fresh.put(path, data, mode=_mode(executable, left))


def _mode(executable: bool, left: LeftBehind | None) -> int:
    """Return the mode of a file in the fresh sandbox."""
    if not executable:
        return 0o644
    if left is None:
        return 0o755
    left.executable += 1
    return 0o644


async def bring(
    run: ExecClient, fresh: ExecClient, paths: Sequence[str], left: LeftBehind | None = None
) -> None:
    """Copy the artifacts, files and folders that Run left, to the same paths of a fresh sandbox.

    Links and special files are left out, as are paths at which there is nothing. Where Eval has a network,
    `left` gets what stays behind for that.

    Raises:
        CarryRefused: They are too large or too many.
        PermanentFailure: The fresh sandbox has a path that nobody can write to.
    """
    room, entries = MAX_ARTIFACTS, len(paths)
    waiting = [(path, len(path), "") for path in paths]
    while waiting:
        path, top, kind = waiting.pop()
        relative = path[top + 1 :].encode("utf-8", "surrogateescape")
        if left is not None and read_by_itself(relative):
            left.add(relative)
            continue
        if kind != "file" and (below := await _listed(run, path)) is not None:
            children = [entry for entry in below if entry.kind in ("file", "directory")]
            # Both are checked before the paths are made, which a few long names of folders multiply.
            entries += len(children)
            room -= sum(len(path) + len(entry.name) for entry in children)
            if entries > MAX_CARRIED:
                raise CarryRefused(f"the artifacts are more than {MAX_CARRIED} files and folders")
            if room < 0:
                raise CarryRefused(f"the artifacts and their paths are larger than {MAX_ARTIFACTS} bytes")
            await _without_links(fresh, path, {entry.name for entry in children})
            waiting += [(f"{path}/{entry.name}", top, entry.kind) for entry in children]
            continue
        try:
            content = await run.read_file(path, max_bytes=room + 1)
        except FileError as error:
            if not kind and error.reason == "FileNotFound":
                continue
            raise CarryRefused(f"an artifact cannot be read: {error.reason}") from error
        room -= len(content.data)
        if room < 0:
            raise CarryRefused(f"the artifacts and their paths are larger than {MAX_ARTIFACTS} bytes")
        try:
            await fresh.write_file(path, content.data, mode=_mode(bool(content.mode & 0o100), left))
        except FileError as error:
            if error.reason in ("PermissionDenied", "ReadOnly"):
                raise PermanentFailure(
                    f"the artifact {path} cannot be written in Eval's sandbox", "CarryUnusable"
                ) from error
            raise CarryRefused(f"an artifact cannot be written: {error.reason}") from error


async def _listed(client: ExecClient, path: str) -> Sequence[DirEntry] | None:
    """Return what a folder of an artifact holds, or None if there is none at its path.

    Raises:
        CarryRefused: It cannot be read.
    """
    try:
        return await client.list_dir(path)
    except FileError as error:
        if error.reason in ("FileNotFound", "NotADirectory"):
            return None
        raise CarryRefused(f"an artifact cannot be read: {error.reason}") from error


async def _without_links(fresh: ExecClient, path: str, names: AbstractSet[str]) -> None:
    """Remove the links of a fresh sandbox where Run left files or folders.

    Otherwise what Run left would be written to their targets, such as a folder of the system.

    Raises:
        CarryRefused: A link cannot be removed, as Run has removed it.
    """
    for entry in await _listed(fresh, path) or ():
        if entry.kind == "symlink" and entry.name in names:
            try:
                await fresh.remove(f"{path}/{entry.name}")
            except FileError as error:
                raise CarryRefused(f"an artifact cannot be written: {error.reason}") from error


def shown(path: bytes) -> str:
    """Return a path for a message: at most its first 200 bytes, on one line."""
    return ascii(path[:200].decode("utf-8", "backslashreplace"))


class _Budget:
    """Counts files and bytes, and refuses too large a carry before any of it is read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries = 0

    def count(self, tree: Tree) -> None:
        self._entries += len(tree)
        if self._entries > MAX_CARRIED:
            raise CarryRefused(
                f"{self._entries} files and folders are to be carried, at most {MAX_CARRIED} may be"
            )

    def add(self, sizes: Iterable[int]) -> None:
        self._bytes += sum(sizes)
        if self._bytes > self._max_bytes:
            raise CarryRefused(
                f"{self._bytes} bytes are to be carried, at most {self._max_bytes} may be "
                "(stages.eval.carry.maxBytes)"
            )


def _topmost(paths: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the paths that are not below any of the others."""
    last = None
    # NUL sorts before every other byte, which places the content of a folder right after the folder.
    for path in sorted(set(paths), key=lambda path: path.replace(b"/", b"\0")):
        if last is None or not path.startswith(last):
            yield path
            last = path + b"/"


async def _content(run: WorkFolder, path: bytes, size: int) -> bytes | None:
    """Return the content of a file, or None if it cannot be read.

    If the file has become shorter than `size`, the content ends where the file ends.
    """
    parts, offset = [], 0
    try:
        while offset < size:
            part = await run.read(path, offset=offset, max_bytes=min(_CHUNK, size - offset))
            if not part:
                break
            parts.append(part)
            offset += len(part)
        if not size:
            await run.read(path, max_bytes=0)
    except FileError as error:
        if error.reason in _ABSENT:
            return None
        raise
    return b"".join(parts)


async def _equal(run: WorkFolder, fresh: WorkFolder, files: Sequence[tuple[bytes, int]]) -> set[bytes]:
    """Return the paths of those files, given as (path, size), whose content is the same in both folders."""
    different: set[bytes] = set()
    batch: list[tuple[bytes, int, int]] = []
    room = MAX_DIGESTED

    async def compare() -> None:
        nonlocal room
        ours, theirs = await run.digests(batch), await fresh.digests(batch)
        for (path, _, _), our_digest, their_digest in zip(batch, ours, theirs, strict=True):
            if our_digest != their_digest or our_digest == bytes(DIGEST_SIZE):
                different.add(path)
        batch.clear()
        room = MAX_DIGESTED

    for path, size in files:
        offset = 0
        while path not in different:
            length = min(size - offset, room)
            batch.append((path, offset, length))
            offset += length
            room -= length
            if not room or len(batch) == _RANGES:
                await compare()
            if offset >= size:
                break
    if batch:
        await compare()
    return {path for path, _ in files} - different
