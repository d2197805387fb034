"""Real providers in private run folders, and listings of what they leave behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollyard_crds.claims import EXEC_SERVER_ARGV
from rollyard_crds.lease import LeaseRef
from rollyard_crds.names import RUNTIME_PATH
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.host.cgroups import find_places
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_sandbox.client import ExecClient
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.rootfolder import make_image, make_root, make_sif, podman_image
from rollyard_testing.waiting import eventually

NODE = "node-a"
SMALL = {"memory_bytes": 192 << 20, "disk_bytes": 16 << 20, "processes": 64}


class Kit:
    """Functions that the tests share; a fixture, since test modules import nothing from each other."""

    NODE = NODE
    SMALL = SMALL

    @staticmethod
    def open(name: str, run_dir: Path, image: str | None = None, *, templates: bool = True) -> NodeProvider:
        """Return a provider of this kind; Apptainer and Podman take `image` where a request names none."""
        options = ApptainerOptions(default_image=image)
        provider = open_provider(
            name, run_dir=run_dir, node=NODE, apptainer=options, default_image=image, templates=templates
        )
        assert isinstance(provider, NodeProvider)
        return provider

    make_root = staticmethod(make_root)

    @staticmethod
    async def clean(provider: NodeProvider) -> None:
        for sandbox_id in provider.claimed():
            await provider.release(sandbox_id)
        await provider.sweep()  # Claimed ones may have died in the test.
        await provider.aclose()

    @staticmethod
    async def sh(sandbox: Sandbox, script: str, timeout: float = patience(20)) -> tuple[int | None, str]:
        """Return exit code and output of a bash script inside."""
        result = await sandbox.client.run(["bash", "-c", script], timeout=timeout)
        return result.exit_code, result.output.decode(errors="replace").strip()

    @staticmethod
    async def acquire(provider: NodeProvider, owner: str = "r-1", **changes: object) -> Sandbox:
        request = SandboxRequest(**{**SMALL, **changes})  # type: ignore[arg-type]
        return await provider.acquire(request, LeaseRef(rollout=owner, token=1))

    @staticmethod
    def processes_naming(text: str) -> list[str]:
        """Return the command lines of all processes of this machine that hold `text`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if text in line:
                    found.append(line)
        return found

    @staticmethod
    def left_behind(run_dir: Path) -> dict[str, list[str]]:
        """Return folders, mounts and sockets of sandboxes under `run_dir`.

        That a server has ended by itself is remembered in a file, also if a test has ended it.
        """
        folder = run_dir / "sandboxes"
        kept = (".sweep", ".crash-")
        names = [name for name in os.listdir(folder) if not name.startswith(kept)] if folder.is_dir() else []
        return {
            "folders": names,
            "mounts": [
                line for line in Path("/proc/self/mounts").read_text().splitlines() if str(run_dir) in line
            ],
            "sockets": [
                line for line in Path("/proc/net/unix").read_text().splitlines() if str(run_dir) in line
            ],
        }

    @staticmethod
    def groups_of(sandbox_ids: list[str]) -> list[Path]:
        """Return the existing control groups of these sandboxes."""
        return [p.path / name for p in find_places() for name in sandbox_ids if (p.path / name).exists()]

    @staticmethod
    async def until(condition: object, seconds: float = 15) -> None:
        """Wait for what the kernel does by itself, such as ending a namespace, for a bounded time."""
        assert callable(condition)
        await eventually(condition, patience(seconds))


class Pods:
    """Sandboxes as a cluster starts them: EXEC_SERVER_ARGV of the bundled runtime in a foreign root."""

    SECRET = "a secret of one sandbox"
    BWRAP = (
        "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent",
        "--as-pid-1", "--cap-drop", "ALL", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
        "--setenv", "HOME", "/work", "--uid", "1000", "--gid", "1000", "--proc", "/proc", "--dev", "/dev",
        "--tmpfs", "/tmp", "--tmpfs", "/work",
    )  # fmt: skip

    @staticmethod
    async def start(
        runtime: Path, root: Path, *arguments: str, secret: str = SECRET, options: Sequence[str] = ()
    ) -> tuple[asyncio.subprocess.Process, str]:
        """Start a sandbox over the entries of `root`, and return where its server listens.

        `arguments` are the server's and begin with --listen; `options` are bubblewrap's.
        """
        binds = [
            part for path in sorted(root.iterdir()) for part in ("--ro-bind", str(path), f"/{path.name}")
        ]
        ready_read, ready_write = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *Pods.BWRAP, *binds, "--ro-bind", str(runtime), RUNTIME_PATH, *options, "--remount-ro", "/",
            *EXEC_SERVER_ARGV, *arguments, "--workdir", "/work", "--ready-fd", str(ready_write),
            "--token-sha256", hashlib.sha256(secret.encode()).hexdigest(),
            pass_fds=(ready_write,),
        )  # fmt: skip
        os.close(ready_write)
        with os.fdopen(ready_read) as ready:
            line = await asyncio.to_thread(ready.readline)
        assert line, "the server ended before it was ready"
        (address,) = json.loads(line)["listen"]
        return process, address

    @staticmethod
    async def stop(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    @staticmethod
    @asynccontextmanager
    async def running(runtime: Path, root: Path, folder: Path) -> AsyncIterator[ExecClient]:
        """Yield a client of such a sandbox, which has no network; its socket is in `folder`."""
        options = ("--unshare-net", "--bind", str(folder), "/sockets")
        process, _ = await Pods.start(runtime, root, "--listen", "unix:/sockets/s", options=options)
        try:
            async with await ExecClient.connect(f"unix:{folder}/s", token=Pods.SECRET) as client:
                yield client
        finally:
            await Pods.stop(process)

    @staticmethod
    def only_bash(root: Path) -> Path:
        """Return a root folder with bash, also under the name sh, and the libraries that it loads."""
        (root / "usr/bin").mkdir(parents=True)
        (root / "bin").symlink_to("usr/bin")
        program = Path(shutil.which("bash") or "/bin/bash").resolve()
        shutil.copy(program, root / "usr/bin/bash")
        (root / "usr/bin/sh").symlink_to("bash")
        listing = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        for word in listing.stdout.split():
            if word.startswith("/"):
                target = root / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
        return root


@pytest.fixture
def pods(bubblewrap_works: None) -> type[Pods]:
    return Pods


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the runtime of sandboxes in foreign images, as the command writes it."""
    out = tmp_path_factory.mktemp("bundle") / "runtime"
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_pipeline.sandboxes.bundle", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because sockets live in it."""
    with tempfile.TemporaryDirectory(prefix="ryb-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Yield a run folder with a short path, because sockets live below it."""
    with tempfile.TemporaryDirectory(prefix="ry-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def root_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an image as a folder, with all that the tests call, and a user as most images lack one."""
    return make_image(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="session")
def sif(apptainer_works: None, root_folder: Path) -> Path:
    """Return the same image as a SIF file."""
    return make_sif(root_folder)


@pytest.fixture(scope="session")
def engine_image(podman_works: None, root_folder: Path) -> Iterator[str]:
    """Yield the name of the same image in Podman."""
    with podman_image(root_folder) as name:
        yield name


_APPTAINER = pytest.param("apptainer", marks=pytest.mark.apptainer)
_PODMAN = pytest.param("podman", marks=(pytest.mark.podman, pytest.mark.nightly))


@pytest.fixture
async def bubblewrap(bubblewrap_works: None, run_dir: Path) -> AsyncIterator[NodeProvider]:
    async with _started("bubblewrap", run_dir) as provider:
        yield provider


@pytest.fixture
async def apptainer(sif: Path, run_dir: Path) -> AsyncIterator[NodeProvider]:
    async with _started("apptainer", run_dir, str(sif)) as provider:
        yield provider


@pytest.fixture
async def podman(engine_image: str, run_dir: Path) -> AsyncIterator[NodeProvider]:
    async with _started("podman", run_dir, engine_image) as provider:
        yield provider


@pytest.fixture
def image_of(request: pytest.FixtureRequest) -> Callable[[str], str | None]:
    """Return the default image that a kind of sandboxes needs.

    It is missing where none can start.
    """

    def find(name: str) -> str | None:
        if name == "bubblewrap":
            request.getfixturevalue("bubblewrap_works")
        image = {"apptainer": "sif", "podman": "engine_image"}.get(name)
        return str(request.getfixturevalue(image)) if image is not None else None

    return find


@pytest.fixture(params=["bubblewrap", _APPTAINER, _PODMAN])
async def isolated(
    request: pytest.FixtureRequest, run_dir: Path, image_of: Callable[[str], str | None]
) -> AsyncIterator[NodeProvider]:
    """Yield each kind that isolates: what isolation promises holds for all of them."""
    async with _started(request.param, run_dir, image_of(request.param)) as provider:
        yield provider


@pytest.fixture(params=["bubblewrap", "process", _APPTAINER, _PODMAN])
async def provider(
    request: pytest.FixtureRequest, run_dir: Path, image_of: Callable[[str], str | None]
) -> AsyncIterator[NodeProvider]:
    """Yield each kind: what their interface promises holds for all."""
    async with _started(request.param, run_dir, image_of(request.param)) as provider:
        yield provider


@pytest.fixture(params=["bubblewrap", "process", _APPTAINER, _PODMAN])
async def slow(
    request: pytest.FixtureRequest, run_dir: Path, image_of: Callable[[str], str | None]
) -> AsyncIterator[NodeProvider]:
    """Yield each kind whose starts take long, so that sandboxes are started in advance."""
    async with _started(request.param, run_dir, image_of(request.param), templates=False) as provider:
        yield provider


@asynccontextmanager
async def _started(
    name: str, run_dir: Path, image: str | None = None, *, templates: bool = True
) -> AsyncIterator[NodeProvider]:
    provider = Kit.open(name, run_dir, image, templates=templates)
    await provider.start()
    try:
        yield provider
    finally:
        await Kit.clean(provider)
