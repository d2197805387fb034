"""Images that are brought ahead of the queue of Init: by a whole worker, into a real image cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_pipeline.errors import NotThere
from rollyard_pipeline.sandboxes.apptainer.image_cache import ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import parse_image
from rollyard_pipeline.sandboxes.apptainer.program import ContainerProgram
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.worker.worker import AT_ONCE, ImagesAhead
from rollyard_testing.pipeline.workerlab import Plane, Provider, Steered, lease, spec, working
from rollyard_testing.waiting import eventually

BUILD = """#!/bin/bash
target=${@: -2:1}; source=${@: -1}
touch "$0.now/$$"; ls "$0.now" | wc -l >> "$0.seen"
case $source in
  *gone*) echo "FATAL: manifest unknown" >&2; rm "$0.now/$$"; exit 255;;
  *away*) echo "FATAL: no such host" >&2; echo "$source" >> "$0.tries"; rm "$0.now/$$"; exit 255;;
  *held*) while ! test -e "$0.go"; do sleep 0.02; done;;
esac
sleep 0.1; echo "$source" > "$target"; rm "$0.now/$$"
"""


class Caching(Provider):
    """A provider whose images are built by a program that only notes them, into a real cache."""

    fetches = True

    def __init__(self, folder: Path, max_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.script = folder / "apptainer"
        self.script.write_text(BUILD)
        self.script.chmod(0o755)
        Path(f"{self.script}.now").mkdir()
        self.cache = ImageCache(folder / "cache", max_bytes)
        self.cache.prepare()
        self._program = ContainerProgram(str(self.script), "apptainer", "1.4.5", (), True)

    async def fetch(self, request: SandboxRequest) -> bool:
        return await self.cache.fetch(parse_image(request.image), self._program, unpacked=False)

    def built(self) -> set[str]:
        return {path.read_text().strip() for path in self.cache.folder.glob("*.sif")}

    def lines(self, name: str) -> list[str]:
        path = Path(f"{self.script}.{name}")
        return path.read_text().split() if path.exists() else []


class Queue(Plane):
    """A control plane whose waiting tasks name these images."""

    def __init__(self, *images: str, **sandbox: Any) -> None:
        super().__init__(RolloutJobSpec.model_validate({**spec().to_json(), "sandbox": sandbox}))
        self.images = list(images)
        self.looks = 0
        self.error: Exception | None = None

    async def waiting_images(self, namespace: str, name: str, uid: str) -> list[str]:
        self._check()
        self.looks += 1
        if self.error is not None:
            raise self.error
        return list(self.images)


@pytest.fixture
def handler() -> type[Steered]:
    return type("Fresh", (Steered,), {"gate": asyncio.Event(), "entered": []})


Ahead = Callable[[Queue, Caching], ImagesAhead]


@pytest.fixture
async def ahead() -> Any:
    made: list[ImagesAhead] = []

    def make(plane: Queue, provider: Caching) -> ImagesAhead:
        made.append(ImagesAhead(plane, provider, look_seconds=0.05, full_seconds=0.05))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_a_worker_brings_what_waits_behind_its_first_lease(
    handler: type[Steered], tmp_path: Path
) -> None:
    """The names are those of the job's platform, and no image is brought twice or more than two at once."""
    provider = Caching(tmp_path)
    names = [f"docker://image:{number}" for number in range(6)]
    plane = Queue(*names, "docker://mapped:1", images={"mapped:1": "docker://mirror/image:0"})
    async with working(plane, handler, provider=provider):
        plane.offer(lease(1))
        await eventually(lambda: len(provider.built()) == 7)
        assert handler.entered == ["r1"], "no other rollout was leased"
        handler.gate.set()
        await plane.wait_for(1)
    assert provider.built() == {*names, "docker://mirror/image:0"}
    assert len(provider.lines("seen")) == 7
    assert max(map(int, provider.lines("seen"))) == AT_ONCE


async def test_a_worker_that_ends_leaves_no_build(handler: type[Steered], tmp_path: Path) -> None:
    provider = Caching(tmp_path)
    plane = Queue("docker://held:1")
    handler.gate.set()
    async with working(plane, handler, provider=provider):
        plane.offer(lease(1))
        await eventually(lambda: len(provider.lines("seen")) == 1)
        await plane.wait_for(1)
    assert list(provider.cache.folder.iterdir()) == []


async def test_what_cannot_be_had_is_left_to_init(ahead: Ahead, tmp_path: Path) -> None:
    provider = Caching(tmp_path)
    plane = Queue("docker://gone:1", "docker://away:1", "docker://image:1")
    ahead(plane, provider).note(lease(1))
    await eventually(lambda: len(provider.lines("tries")) == 3 and plane.looks > 5)
    assert (provider.built(), len(provider.lines("seen"))) == ({"docker://image:1"}, 1 + 3 + 1)


@pytest.mark.attack(
    "a job's tasks name so many images that those brought ahead fill the node's disk, or displace those "
    "of others",
    boundary="slurm",
    surface="`sandbox.image`",
    stopped_by="two at a time, of the next 64 tasks, and only while the cache has room",
)
async def test_a_full_cache_gets_nothing_more_until_there_is_room(ahead: Ahead, tmp_path: Path) -> None:
    provider = Caching(tmp_path, max_bytes=10)
    plane = Queue("docker://image:1", "docker://image:2", "docker://image:3")
    ahead(plane, provider).note(lease(1))
    await eventually(lambda: plane.looks > 3)
    held = provider.built()
    assert 1 <= len(held) <= AT_ONCE, "those that began together did not know of each other"
    for path in provider.cache.folder.glob("*.sif"):
        path.unlink()
    await eventually(lambda: bool(provider.built() - held))


def looking() -> bool:
    """Return whether a job is looked after now."""
    return any(task.get_name().startswith("images of ") for task in asyncio.all_tasks())


@pytest.mark.parametrize("error", [None, NotThere("the job is gone")])
async def test_a_job_is_asked_about_only_while_its_tasks_name_images(
    ahead: Ahead, tmp_path: Path, error: Exception | None
) -> None:
    plane = Queue()
    plane.error = error
    one = ahead(plane, Caching(tmp_path))
    one.note(lease(1))
    assert looking()
    await eventually(lambda: not looking())
    assert plane.looks == 1
    one.note(lease(2))
    assert not looking()
