"""What only sandboxes of container engines do. Most tests have a program in the engine's place."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.containers import engine as engines
from rollyard_pipeline.sandboxes.containers import starter as starters
from rollyard_pipeline.sandboxes.containers.starter import container_name
from rollyard_pipeline.sandboxes.errors import (
    DiskFull,
    ImageNotUsable,
    NodeUnusable,
    SandboxImpossible,
    SandboxLost,
    SandboxProviderError,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.runtime import Runtime, make_runtime
from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.rootfolder import make_root, podman_image

PODMAN = {
    "host": {
        "cgroupControllers": ["cpu", "memory", "pids"],
        "cgroupVersion": "v2",
        "security": {"rootless": False},
        "serviceIsRemote": False,
    },
    "version": {"Version": "4.3.1"},
}
DOCKER = {
    "ServerVersion": "28.2.2",
    "OperatingSystem": "Debian GNU/Linux 12 (bookworm)",
    "OSType": "linux",
    "SecurityOptions": ["name=seccomp,profile=builtin", "name=cgroupns"],
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
}
SCRIPT = """#!/bin/sh
for word; do printf '%s\\0' "$word"; done >> {folder}/calls; printf '\\n' >> {folder}/calls
case "$1 $2" in
  info*) cat {folder}/info; exit $(cat {folder}/info-code) ;;
  "image inspect") {inspect} ;;
  pull*) {pull} ;;
  run*) {run} ;;
esac
"""
HAS_IT = "echo sha256:0123 amd64"
LACKS_IT = "echo 'Error: no such image' >&2; exit 125"

Engine = Callable[..., None]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """Return what is mounted into every sandbox, which takes longer to make than all else here."""
    return make_runtime(tmp_path_factory.mktemp("runtime"))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Engine:
    """Return a function that puts a program in an engine's place, which notes its calls and answers so."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.release", lambda: "6.1.0")
    monkeypatch.setattr(starters, "make_runtime", lambda folder, tools: runtime)

    def put(
        info: dict[str, Any] | str = PODMAN, *, code: int = 0, inspect: str = HAS_IT, pull: str = "true",
        run: str = "echo broken >&2; exit 126", kind: str = "podman",
    ) -> None:  # fmt: skip
        text = info if isinstance(info, str) else f"WARNING: no swap\n{json.dumps(info, indent=1)}\n"
        (tmp_path / "info").write_text(text)
        (tmp_path / "info-code").write_text(str(code))
        script = SCRIPT.format(folder=tmp_path, inspect=inspect, pull=pull, run=run)
        (tmp_path / kind).write_text(script)
        (tmp_path / kind).chmod(0o755)

    return put


def calls(tmp_path: Path) -> list[list[str]]:
    """Return the arguments of each call of the engine."""
    text = (tmp_path / "calls").read_text()
    return [call.split("\0") for call in text.split("\0\n")[:-1]]


async def refusal(kind: str, run_dir: Path) -> NodeUnusable:
    provider = open_provider(kind, run_dir=run_dir, node="n")
    with pytest.raises(NodeUnusable) as caught:
        await provider.start()
    await provider.aclose()
    return caught.value


async def acquire(run_dir: Path, kind: str = "podman", **changes: Any) -> None:
    """Acquire a sandbox of a worker that has no control groups, and release it."""
    request = SandboxRequest(**{"image": "docker://team/image:1", "memory_bytes": 192 << 20, **changes})
    provider = open_provider(kind, run_dir=run_dir, node="n", find_places=list)
    await provider.start()
    try:
        await provider.acquire(request, LeaseRef(rollout="r-1", token=1))
    finally:
        await provider.aclose()


async def test_no_engine(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind in ("docker", "podman"):
        error = await refusal(kind, run_dir)
        assert error.reason == "EngineMissing"
        assert f"apt-get install {kind}" in str(error)


@pytest.mark.parametrize(
    ("kind", "info", "code", "words"),
    [
        ("docker", {"ServerErrors": ["Cannot connect to the Docker daemon"]}, 1, "systemctl start docker"),
        ("docker", {"ServerErrors": ["permission denied while trying to connect"]}, 0, "groups docker USER"),
        ("docker", {**DOCKER, "OperatingSystem": "Docker Desktop"}, 0, "run the worker there"),
        ("docker", {**DOCKER, "PidsLimit": False}, 0, "cannot limit pids .* mount the missing controllers"),
        ("docker", {**DOCKER, "ServerVersion": "19.03.1"}, 0, "19.03.1, which is too old"),
        ("docker", PODMAN, 0, "use --sandbox podman"),
        ("podman", "Error: cannot setup namespace", 125, "cannot setup namespace.*see `podman info`"),
        ("podman", {**PODMAN, "host": {**PODMAN["host"], "serviceIsRemote": True}}, 0, "podman machine"),
        (
            "podman",
            {**PODMAN, "host": {**PODMAN["host"], "cgroupVersion": "v1", "security": {"rootless": True}}},
            0,
            "cannot limit memory, pids, cpu .*control groups of version 2",
        ),
    ],
)
async def test_an_engine_that_cannot_do_it_says_what_to_do(
    engine: Engine, run_dir: Path, kind: str, info: Any, code: int, words: str
) -> None:
    engine(info, code=code, kind=kind)
    error = await refusal(kind, run_dir)
    assert error.reason == "EngineUnusable"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(str(error))


async def test_an_engine_that_hangs_is_given_up(
    engine: Engine, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(run="exec sleep 1000")
    monkeypatch.setattr(starters, "_START_SECONDS", 0.2)
    with pytest.raises(SandboxStartFailed, match=r"not ready within 0\.2 s"):
        await acquire(run_dir)
    (Path(engines.shutil.which("podman") or "")).write_text("#!/bin/sh\nexec sleep 1000\n")
    monkeypatch.setattr(engines, "INFO_SECONDS", 0.2)
    assert (await refusal("podman", run_dir)).reason == "EngineUnusable"


async def test_what_a_container_is_started_with(
    engine: Engine, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.org")
    for kind, info in (("podman", PODMAN), ("docker", DOCKER)):
        engine(info, run=f'echo "$HTTP_PROXY" > {tmp_path}/proxy; echo broken >&2; exit 126', kind=kind)
        with pytest.raises(SandboxStartFailed, match=f"{kind} run: broken"):
            await acquire(run_dir, kind, cpu=1.5, processes=60)
        assert (tmp_path / "proxy").read_text() == "\n", "the engine would hand it on to programs inside"
        removal = calls(tmp_path)[-1]
        command = [call for call in calls(tmp_path) if call[0] == "run"][-1]
        given = set(itertools.pairwise(command))
        assert {
            ("--pull", "never"), ("--network", "none"), ("--cap-drop", "ALL"), ("--log-driver", "none"),
            ("--security-opt", "no-new-privileges"), ("--memory", str(192 << 20)),
            ("--memory-swap", str(192 << 20)), ("--cpu-quota", "150000"), ("--pids-limit", "65"),
        } <= given  # fmt: skip
        assert {"--detach", "--read-only", "--no-healthcheck", "sha256:0123"} <= set(command)
        assert not {"--privileged", "--volume", "-v"} & set(command)
        mounts = [value for name, value in given if name == "--mount"]
        assert mounts
        assert all(mount.endswith(",ro") for mount in mounts)
        assert not [mount for mount in mounts if "docker.sock" in mount or "podman.sock" in mount]
        assert (("--uidmap", f"0:{starters.FIRST_USER}:65536") in given) == (kind == "podman")
        name = command[command.index("--name") + 1]
        assert removal[:2] == ["rm", "--force"]
        assert removal[-1] == name
        assert SandboxFolder(run_dir).ids() == []


@pytest.mark.attack(
    "a task's image is an option of the engine, such as `--privileged`, or a path of the machine",
    boundary="sandbox",
    surface="`sandbox.image` with Docker and Podman",
    stopped_by="only a well-formed name reaches the engine, which starts images by their ids",
)
@pytest.mark.parametrize(
    ("image", "words"),
    [
        (None, "no default image.*--default-image"),
        ("/images/root", "import - NAME"),
        ("docker-archive:/images/one.tar", "load --input FILE"),
        ("--privileged", "takes docker://NAME"),
        ("docker://-v/etc:/mnt", "takes docker://NAME"),
        ("docker://oci:/etc", "takes docker://NAME"),
        ("docker://a b", "takes docker://NAME"),
        ("oras://hub/one", "takes docker://NAME"),
        (f"{DOCKERFILE_IMAGE}one", "podman build.*sandbox.images"),
    ],
)
async def test_what_is_no_name_of_an_image_never_reaches_the_engine(
    engine: Engine, run_dir: Path, tmp_path: Path, image: str | None, words: str
) -> None:
    engine()
    with pytest.raises(ImageNotUsable, match=words):
        await acquire(run_dir, image=image)
    assert {call[0] for call in calls(tmp_path)} <= {"info", "ps"}


@pytest.mark.parametrize(
    "image", ["python", "python:3.12-slim", "localhost:5000/a/b:tag", f"h.example/a@sha256:{'0' * 64}"]
)
async def test_names_of_images(engine: Engine, run_dir: Path, tmp_path: Path, image: str) -> None:
    engine(inspect=LACKS_IT, pull="echo 'manifest unknown' >&2; exit 125")
    for name in (image, f"docker://{image}"):
        with pytest.raises(ImageNotUsable, match="cannot pull it: manifest unknown"):
            await acquire(run_dir, image=name)
        assert calls(tmp_path)[-1] == ["pull", "--quiet", f"docker://{image}"]


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({"inspect": "echo sha256:0123 s390x"}, ImageNotUsable, "is for s390x, and this machine is amd64"),
        ({"inspect": "echo 'database is locked'; exit 125"}, SandboxStartFailed, "database is locked"),
        ({"inspect": LACKS_IT, "pull": "echo 'i/o timeout'; exit 1"}, SandboxStartFailed, "i/o timeout"),
        ({"inspect": LACKS_IT, "pull": "echo 'no space left on device'; exit 1"}, DiskFull, "no space left"),
        ({"run": "echo 'no space left on device'; exit 125"}, DiskFull, "no space left"),
        ({"run": "echo 'exec format error'; exit 126"}, ImageNotUsable, "exec format error"),
    ],
)
async def test_errors_of_images(
    engine: Engine, run_dir: Path, answers: dict[str, str], kind: type[SandboxProviderError], words: str
) -> None:
    engine(**answers)
    with pytest.raises(kind, match=words):
        await acquire(run_dir)


async def test_the_installers_list_holds_for_plain_names(engine: Engine, run_dir: Path) -> None:
    engine()
    provider: SandboxProvider = open_provider(
        "podman", run_dir=run_dir, node="n", images=["docker://localhost/team/"]
    )
    await provider.start()
    owner = LeaseRef(rollout="r-1", token=1)
    for image in ("other/image", "docker://other/image", "localhost/team/../other"):
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            await provider.acquire(SandboxRequest(image=image), owner)
    assert await provider.fetch(SandboxRequest(image="localhost/team/one"))
    await provider.aclose()


def listed(*arguments: str) -> list[str]:
    """Return the names of the containers that Podman has."""
    command = ["podman", "ps", "--all", "--format", "{{.Names}}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=True)
    return done.stdout.split()


@pytest.mark.podman
@pytest.mark.nightly
async def test_a_container_that_somebody_removed_is_lost(kit: Any, podman: NodeProvider) -> None:
    sandbox = await kit.acquire(podman)
    name = container_name(sandbox.handle.id)
    assert listed("--filter", f"name={name}") == [name]
    remove = ["podman", "rm", "--force", "--time", "0", name]
    await asyncio.to_thread(subprocess.run, remove, capture_output=True, timeout=patience(60), check=True)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await podman.attach(sandbox.handle)
    assert await podman.own_end(sandbox.handle) == "", "nobody inside is at fault"
    await podman.release(sandbox.handle)
    assert listed("--filter", f"name={name}") == []


@pytest.mark.podman
@pytest.mark.nightly
async def test_a_worker_removes_containers_without_a_folder(
    kit: Any, podman: NodeProvider, run_dir: Path, engine_image: str
) -> None:
    sandbox = await kit.acquire(podman)
    await sandbox.close()
    name = container_name(sandbox.handle.id)
    SandboxFolder(run_dir).remove(sandbox.handle.id)
    assert listed("--filter", f"name={name}") == [name]
    other = kit.open("podman", run_dir, engine_image)
    await other.start()
    assert listed("--filter", f"name={name}") == []
    await other.aclose()


@pytest.mark.podman
@pytest.mark.nightly
async def test_an_image_can_be_changed_within_its_size(kit: Any, run_dir: Path, engine_image: str) -> None:
    provider = open_provider("podman", run_dir=run_dir, node="n", default_image=engine_image, fakeroot=True)
    await provider.start()
    try:
        async with await kit.acquire(provider) as sandbox:
            script = (
                "echo new >> /etc/image-name; rm -r /opt; mkdir /opt /opt/made; cat /etc/image-name; ls /opt"
            )
            assert (await kit.sh(sandbox, script))[1].split() == ["made-by-test", "new", "made"]
            code, text = await kit.sh(sandbox, "head -c 64M /dev/zero > /opt/large")
            assert code != 0
            assert "No space left" in text
            assert (await kit.sh(sandbox, "ls -A /sys; cat /etc/hosts"))[1].split() == [
                "127.0.0.1", "localhost", "sandbox", "::1", "localhost",
            ]  # fmt: skip
    finally:
        await kit.clean(provider)


@pytest.mark.podman
@pytest.mark.nightly
async def test_an_image_without_bash(
    kit: Any, podman: NodeProvider, tmp_path: Path, podman_works: None
) -> None:
    root = make_root(tmp_path / "root")
    (root / "usr/bin/bash").unlink()
    with podman_image(root) as image, pytest.raises(ImageNotUsable, match="has no bash"):
        await kit.acquire(podman, image=image)
    assert podman.in_use() == []
