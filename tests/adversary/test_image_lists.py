"""The author of a job names images that the installer of the workers does not list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds.fields.sandbox import SandboxSpec
from rollyard_crds.lease import LeaseRef
from rollyard_crds.task import TaskSandbox
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.allowed_images import AllowedImages
from rollyard_pipeline.sandboxes.errors import SandboxImpossible
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest
from rollyard_testing.sandboxes.rootfolder import make_root

pytestmark = pytest.mark.attack(boundary="slurm")


LISTED = ("docker://registry.example.org/team/", "oras://hub/one", "docker://python")
OWNER = LeaseRef(rollout="r", token=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with listed images, the user's own files beside them, and a link that leads there."""
    base = tmp_path_factory.mktemp("w")
    make_root(base / "images/plain")
    secret = make_root(base / "home")
    (secret / "etc/key").write_text("hunter2")
    (base / "images/link").symlink_to(secret)
    (base / "images-of-others").symlink_to(secret)
    (base / "home/archive.tar").write_bytes(b"")
    return base


@pytest.fixture
async def provider(
    bubblewrap_works: None, world: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxProvider]:
    images = (str(world / "images"), *LISTED)
    found = open_provider("bubblewrap", run_dir=tmp_path_factory.mktemp("s"), node="n", images=images)
    await found.start()
    yield found
    await found.aclose()


@pytest.mark.attack(
    "an author of a control plane that a bridge joins names a root folder or an image with files of the "
    "bridge's user, directly, by `..` or by a link",
    surface="`sandbox.image`",
    stopped_by="`--allow-image`: none but the default image, unless the installer lists more; links are "
    "followed first",
)
async def test_only_listed_root_folders_are_shown(provider: SandboxProvider, world: Path) -> None:
    for image in ("home", "images/link", "images/../home", "images-of-others", "missing", ""):
        request = SandboxRequest.of(SandboxSpec(image=f"{world}/{image}"))
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            await provider.acquire(request, OWNER)
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            await provider.warm(request, 1)
    # A task names one, by itself and by the job's own map of names.
    for spec, image in (
        (SandboxSpec(), str(world / "home")),
        (SandboxSpec(images={"python:3.12": str(world / "home")}), "docker://python:3.12"),
    ):
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            await provider.acquire(SandboxRequest.of(spec, TaskSandbox(image=image)), OWNER)
        # Nothing is brought ahead of the queue that may not be started.
        with pytest.raises(SandboxImpossible, match="--allow-image") as refused:
            await provider.fetch(SandboxRequest.of(spec, TaskSandbox(image=image)))
        assert (refused.value.reason, refused.value.retryable) == ("ImageNotAllowed", False)
    for spec in (SandboxSpec(), SandboxSpec(image=str(world / "images/plain"))):
        async with await provider.acquire(SandboxRequest.of(spec), OWNER) as sandbox:
            await provider.release(sandbox.handle)


@pytest.mark.attack(
    "it makes a node contact any registry or an internal address, at once or ahead of the queue",
    surface="`sandbox.image`",
    stopped_by="`--allow-image`; references are compared by whole parts",
)
@pytest.mark.parametrize(
    "image",
    [
        "docker://registry.example.org.evil.net/team/x",
        "docker://registry.example.org/teams/x",
        "docker://registry.example.org/team/../other/x",
        "docker://registry.example.org/team//x",
        "docker://registry.example.org/team/./x",
        "docker://10.0.0.1:5000/x",
        "docker://registry.example.org@10.0.0.1/team/x",
        "docker:///registry.example.org/team/x",
        "DOCKER://registry.example.org/team/x",
        "library://registry.example.org/team/x",
        "oras://hub/one-more",
        "oras://hub/one/../two",
        "docker://python:8080/x",
        "docker://python.evil.net/x",
        "docker-archive:/home/archive.tar",
        "docker-archive:///home/archive.tar",
        "docker-archive:/images/../home/archive.tar",
        "docker-archive:relative.tar",
        "http://10.0.0.1/x",
        "shub://x",
        "images/plain",
        "/",
        "/images\0/plain",
    ],
)
def test_references_beside_the_list(world: Path, image: str) -> None:
    image = image.replace("/home/", f"{world}/home/").replace("/images", f"{world}/images")
    with pytest.raises(SandboxImpossible, match="--allow-image"):
        AllowedImages([str(world / "images"), *LISTED]).check(image)


ODD_ENTRIES = pytest.mark.attack(
    "an entry that means something else than its author thinks",
    surface="`--allow-image`",
    stopped_by="it is refused when the worker or the bridge starts; what is listed works",
)


@ODD_ENTRIES
@pytest.mark.parametrize(
    "image",
    [
        None,
        "docker://registry.example.org/team/x:1@sha256:00",
        "oras://hub/one",
        "oras://hub/one:2",
        "docker://python:3.12-slim",
        "docker://python@sha256:00",
        "/images/plain",
        "/images/new.sif",
        "docker-archive:/images/new.tar",
    ],
)
def test_what_is_listed(world: Path, image: str | None) -> None:
    image = image and image.replace("/images", f"{world}/images")
    AllowedImages([str(world / "images"), *LISTED]).check(image)
    AllowedImages(["any"]).check(image)
    if image is not None:
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            AllowedImages(["none"]).check(image)


@ODD_ENTRIES
@pytest.mark.parametrize(
    "entries", [["relative/path"], ["docker://"], ["docker://h/../x"], ["http://x/"], ["any", "/x"], [""]]
)
def test_a_list_that_means_nothing_is_refused(entries: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must be the absolute path|stand alone"):
        AllowedImages(entries)
