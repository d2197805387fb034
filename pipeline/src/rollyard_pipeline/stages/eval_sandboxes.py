"""Eval's fresh sandbox: it is started, prepared as Init prepares one, given the carry, and released.

The carry is what goes from Run's sandbox to Eval's: named files, or all changes of a folder. Every process of
Run is dead when it is taken. What Run left is hostile nevertheless: its names, sizes, links and special files
are checked here, and no operation inside a sandbox follows a symbolic link. Nothing that Run left is ever
written to the worker's own disk. Only regular files and folders are carried, and of a file's mode only
whether the file is executable. Symbolic links are not carried, because a link that Run made could lead a test
to the answer that the test itself brings. Where Eval has a network, less is carried (see `inert_files`): the
functions then get a `LeftBehind`, to which they add what was left.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from rollyard_crds.fields.eval_carry import EvalCarry, carried_path
from rollyard_crds.lease import Lease
from rollyard_crds.rolloutjob import EvalSandbox, RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_sandbox.client import DirEntry, ExecClient
from rollyard_sandbox.client.work_folder import DIGEST_SIZE, TreeEntry, WorkFolder
from rollyard_sandbox.errors import ConnectionLost, FileError
from rollyard_sandbox.errors import SandboxError as ExecError
from rollyard_sandbox.frames import MAX_DIGESTED

from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import CarryRefused, EvalSandboxEnded, PermanentFailure, PipelineError
from rollyard_pipeline.handlers.base import FolderChanges, Handler, StageContext
from rollyard_pipeline.handlers.isolated.places import blocked
from rollyard_pipeline.sabotage import CRASHED, reward_reason
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import SandboxLost, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider
from rollyard_pipeline.sandboxes.start_span import sandbox_started
from rollyard_pipeline.stages.contexts import eval_network, narrowed, pins_of, prepare, sandbox_request
from rollyard_pipeline.stages.inert_files import LeftBehind, read_by_itself
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces

MAX_CARRIED: Final = 10_000
"""The largest number of files and folders that can be carried."""
MAX_ARTIFACTS: Final = 16 << 20
"""The largest size of all artifacts and their paths together, in bytes."""
_CHUNK: Final = 8 << 20  # The largest number of bytes in one read.
_RANGES: Final = 512  # The largest number of ranges in one request for digests.
_ABSENT: Final = ("FileNotFound", "NotADirectory", "SymlinkLoop", "PermissionDenied", "NotAFile")
"""The reasons why a file that Run left cannot be read. Such a file is not carried."""

Tree = Mapping[bytes, TreeEntry]


log = logging.getLogger(__name__)

CARRIES_AT_ONCE: Final = 4
"""The number of rollouts whose carried files may be in the worker's memory at the same time."""


Attach = Callable[[Lease], AbstractAsyncContextManager[Sandbox | None]]


def carries(spec: RolloutJobSpec, handler: Handler, task: Task) -> bool:
    """Return whether a fresh sandbox of Eval gets anything that Run left."""
    return (
        spec.stages.eval.carry is not None
        or handler.eval_apart(task) is not None
        or handler.changes(task, "/") is not None
        or bool(handler.artifacts(task))
    )


def reaches(spec: RolloutJobSpec, handler: Handler, task: Task) -> bool:
    """Return whether anything from the policy gets into a fresh sandbox of Eval: files, or an answer."""
    return carries(spec, handler, task) or handler.judges_answer(task)


def eval_sandbox(spec: RolloutJobSpec, handler: Handler, task: Task) -> EvalSandbox:
    """Return which sandbox Eval uses.

    A task that must have a sandbox of its own gets it. Otherwise the job's own setting comes first. Without
    one, Eval gets a fresh sandbox if the job has a carry, or the task's tests have a network, and otherwise
    the kind that the handler prefers.

    Raises:
        TaskInvalid: The tests need a network that the job does not give them.
    """
    stage = spec.stages.eval
    if not handler.needs_sandbox:
        return "shared"  # This handler does not use a sandbox.
    if handler.eval_apart(task) is not None:
        return "fresh"
    if stage.sandbox is not None:
        return stage.sandbox
    networked = bool(eval_network(spec, handler, task).host_rules)
    return "fresh" if stage.carry is not None or networked else handler.eval_sandbox


class EvalSandboxes:
    """Provides fresh sandboxes for Eval, one for each rollout that is being evaluated.

    Run's sandbox is kept until the outcome is reported, which allows another worker to repeat Eval from what
    Run left. The fresh sandbox belongs to this process and is released in every case.

    Args:
        attach: Opens a connection to Run's sandbox.
        egress: The network of sandboxes, which `handler.init` has. That of the evaluation begins later.
    """

    def __init__(
        self, provider: SandboxProvider, places: SandboxPlaces, attach: Attach, egress: Egress
    ) -> None:
        self._provider = provider
        self._places = places
        self._attach = attach
        self._egress = egress
        self._carries = asyncio.Semaphore(CARRIES_AT_ONCE)
        self._releases: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def fresh(
        self, holding: HeldLease, spec: RolloutJobSpec, handler: Handler, context: StageContext
    ) -> AsyncIterator[Sandbox]:
        """Provide the sandbox in which `handler.eval` works, and release it afterwards.

        Args:
            context: The context of Eval. `handler.init` gets its own context with a copy of the JSON carry.
                If its purpose is "control", nothing of Run's is carried.

        Raises:
            CarryRefused: What Run left cannot be carried. The policy is to blame.
            EvalSandboxEnded: With the carried files or the answer, the evaluation used up the sandbox's
                memory, or ended its exec server once more. The policy is to blame.
            PermanentFailure: The job's Init makes the carry impossible.
            SandboxLost: Run's sandbox is gone, and the job has a carry.
            PipelineError: The fresh sandbox could not be prepared, or was lost, and Eval can be repeated.
                Or `handler.init` failed, or the provider failed in a way that no further attempt can fix.
        """
        networked = bool(eval_network(spec, handler, context.task).host_rules)
        left = LeftBehind() if networked else None
        async with self._places.for_eval(holding):
            holding.started = time.monotonic()  # Waiting for a place counts against no limit.
            try:
                async with await self._prepared(holding, spec, handler, context, left) as sandbox:
                    try:
                        yield sandbox
                    except (SandboxLost, ExecError) as error:
                        lost = isinstance(error, SandboxLost | ConnectionLost)
                        reached = context.purpose != "control" and reaches(spec, handler, context.task)
                        end = await self._provider.own_end(sandbox.handle) if lost and reached else ""
                        if end and (end != CRASHED or holding.lease.attempt):
                            raise EvalSandboxEnded(f"{error.reason}: {error}", end) from error
                        raise _failed(error) from error
            finally:
                context.show("" if left is None else str(left))
                await self._release(holding)

    async def _prepared(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        left: LeftBehind | None,
    ) -> Sandbox:
        carried = context.purpose != "control" and carries(spec, handler, context.task)
        async with self._attach(holding.lease) if carried else nullcontext() as run:
            if run is not None:
                await run.client.kill_all()
            used = None if run is None else _Used(run, left)
            return await self._started(holding, spec, handler, context, used)

    async def _started(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        used: _Used | None,
    ) -> Sandbox:
        seconds = spec.stages.init.timeout_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._start(holding, spec, handler, context, used, limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            words = f"Eval's sandbox took longer than stages.init.timeoutSeconds ({seconds} s)"
            words = ": ".join(filter(None, (words, blocked(error))))
            raise PipelineError(words, "EvalSandboxFailed") from error
        except SandboxProviderError as error:
            if not error.retryable or not error.counts:
                raise
            raise _failed(error) from error
        except ExecError as error:
            if used is not None and not await _answers(used.sandbox):
                raise SandboxLost(f"Run's sandbox was lost on the way to Eval's: {error}") from error
            raise _failed(error) from error

    async def _start(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        used: _Used | None,
        limit: asyncio.Timeout,
    ) -> Sandbox:
        task = holding.lease.task
        apart = handler.eval_apart(task)
        network = narrowed(spec.sandbox, task.sandbox if apart is None else apart)
        request = sandbox_request(spec, handler, task, apart)
        sandbox = await sandbox_started(self._provider, request, holding.ref, for_eval=True)
        holding.eval_sandbox = sandbox.handle
        try:
            async with self._egress.lent(sandbox, network, context.rollout, context.env, pins_of(spec)):
                own = StageContext(
                    task=context.task,
                    spec=spec,
                    rollout=context.rollout,
                    sample_index=context.sample_index,
                    timeout=float(spec.stages.init.timeout_seconds),
                    client=sandbox.client,
                    workdir=sandbox.workdir,
                    env=context.env,
                    carry=copy.deepcopy(context.carry),
                    for_eval=True,
                    purpose="control" if context.purpose == "control" else "eval",
                )
                await prepare(handler, own)
            if used is not None:
                async with place_within(self._carries, limit):
                    if apart is None:
                        # Work folders may have different paths.
                        folders = [handler.changes(task, each.workdir) for each in (used.sandbox, sandbox)]
                        await _carry(used, sandbox, spec.stages.eval.carry, folders)
                    paths = handler.artifacts(task)
                    await bring(used.sandbox.client, sandbox.client, paths, used.left)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _release(self, holding: HeldLease) -> None:
        handle = holding.eval_sandbox
        if handle is None:
            return
        # A separate task completes the release even if a second cancellation interrupts this one.
        release = asyncio.ensure_future(self._provider.release(handle))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)
        try:
            await asyncio.shield(release)
        except SandboxProviderError as error:
            log.warning("Eval's sandbox %s: %s", handle.id, error)
        finally:
            holding.eval_sandbox = None


@dataclass(frozen=True, slots=True)
class _Used:
    """The sandbox that Run used, and where Eval has a network, which of its files are left behind."""

    sandbox: Sandbox
    left: LeftBehind | None


async def _carry(
    used: _Used, fresh: Sandbox, carry: EvalCarry | None, folders: Sequence[FolderChanges | None]
) -> None:
    # Init's processes may still write to the folder that is compared.
    await fresh.client.kill_all()
    run, empty = (
        sandbox.client.work_folder(None if changes is None else changes.folder)
        for sandbox, changes in zip((used.sandbox, fresh), folders, strict=True)
    )
    changes = folders[1]
    try:
        if changes is not None:
            most = changes.max_bytes if carry is None else carry.max_bytes
            carried = await take_changes(run, empty, most, changes.protected, used.left)
        elif carry is None:
            return
        elif carry.diff:
            carried = await take_changes(run, empty, carry.max_bytes, left=used.left)
        else:
            carried = await take_files(run, carry, used.left)
        await put(empty, carried, used.left)
    except ExecError as error:
        if reward_reason(error):
            raise CarryRefused(f"{error.reason}: {error}") from error
        raise


@asynccontextmanager
async def place_within(places: asyncio.Semaphore, limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Hold a place. Waiting for it does not count against the limit of what surrounds this context."""
    clock, end = asyncio.get_running_loop().time, limit.when()
    begun = clock()
    limit.reschedule(None)
    async with places:
        limit.reschedule(None if end is None else end + clock() - begun)
        yield


async def _answers(sandbox: Sandbox) -> bool:
    try:
        await sandbox.client.info()
    except ExecError:
        return False
    return True


def _failed(error: SandboxProviderError | ExecError) -> PipelineError:
    return PipelineError(f"{error.reason}: {error}", "EvalSandboxFailed")


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
