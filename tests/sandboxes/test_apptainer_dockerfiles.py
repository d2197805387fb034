"""Images of Dockerfiles, built without root by the real program over an image of this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.task import Task
from rollyard_pipeline.sandboxes.apptainer.image_cache import ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import Image, dockerfile_image
from rollyard_pipeline.sandboxes.apptainer.program import find_program
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.dockerfiles.context import HeldContext
from rollyard_pipeline.sandboxes.dockerfiles.recipe import make_recipe
from rollyard_pipeline.sandboxes.errors import DockerfileRefused, ImageNotUsable
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack, read_folder
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.stagelab import SMALL, stage_lab
from rollyard_testing.sandboxes.rootfolder import make_image

pytestmark = [pytest.mark.apptainer, pytest.mark.nightly]

DOCKERFILE = """ARG VERSION=1
FROM some/base:${VERSION} AS only
RUN cd /etc && export LOST=yes && echo first > /order
RUN test "$(pwd)" = / && test -z "$LOST" && echo hidden > /tmp/from-the-build
RUN cat /tmp/from-the-build; false; true
ENV GREETING="hello  world" \\
    # a comment in between
    OTHER='$not `expanded`'
ENV PATH=/opt/own:$PATH AGAIN=$GREETING
ARG DURING=build
WORKDIR /app
COPY tool.sh /opt/own/tool
COPY . .
COPY tool.sh data/
RUN echo "$DURING $GREETING" >> /order; (setsid sleep 4711 > /dev/null 2>&1 &)
RUN cat /proc/1/environ /proc/self/environ | tr '\\0' '\\n' > /environment
CMD ["ignored"]
"""
FILES = {"tool.sh": (b"#!/bin/sh\necho tool\n", True), "data/one": (b"1", False), "data/.two": (b"2", False)}


@pytest.fixture(scope="module")
def base(apptainer_works: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root folder with what build scripts call."""
    return make_image(tmp_path_factory.mktemp("base") / "root", "cp")


def image(base: Path, text: str = DOCKERFILE) -> Image:
    recipe = make_recipe(text, HeldContext(FILES))
    return dockerfile_image("dockerfile:test", recipe, {"some/base:1": str(base)})


async def test_a_built_image_is_what_docker_would_build(
    kit: Any, apptainer: NodeProvider, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLYARD_TOKEN", "s3cret")
    program = await find_program()
    cache = ImageCache(tmp_path / "cache", dockerfiles=True)
    cache.prepare()
    built = await cache.ready(image(base), program, unpacked=False)
    assert sorted(path.name for path in cache.folder.iterdir()) == [f"{built.stem}.json", built.name]
    assert kit.processes_naming("sleep\x004711") == []
    assert not Path("/tmp/from-the-build").exists()
    script = (
        "cat /order; tool; echo $GREETING,$OTHER,$AGAIN; cd /app; ls -A . data; ls -A /tmp; "
        "ls -d /.rollyard-build; stat -c '%a %n' tool.sh data/one"
    )
    async with await kit.acquire(apptainer, image=str(built)) as sandbox:
        code, output = await kit.sh(sandbox, script)
        _, environment = await kit.sh(sandbox, "cat /environment")
    assert code == 0
    assert output.splitlines() == [
        "first", "build hello  world", "tool", "hello world,$not `expanded`,hello world",
        ".:", "data", "tool.sh", "", "data:", ".two", "one", "tool.sh",
        "ls: cannot access '/.rollyard-build': No such file or directory", "755 tool.sh", "644 data/one",
    ]  # fmt: skip
    assert "HOME=" in environment
    assert "s3cret" not in environment
    # It is there from now on, and one that is unpacked for nodes without FUSE is made of it.
    again = ImageCache(tmp_path / "cache")
    assert await again.ready(image(base), program, unpacked=False) == built
    folder = await again.ready(image(base), program, unpacked=True)
    assert (folder / "order").read_text() == "first\nbuild hello  world\n"


async def test_a_command_that_fails_ends_the_build(base: Path, tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", dockerfiles=True)
    cache.prepare()
    text = "FROM some/base:1\nRUN mkdir /closed && touch /closed/x && chmod 0 /closed\nRUN false && true\n"
    with pytest.raises(ImageNotUsable, match=r"'dockerfile:test' cannot be built: .*false && true"):
        await cache.ready(image(base, text), await find_program(), unpacked=False)
    assert list(cache.folder.iterdir()) == []


async def test_a_build_that_is_cancelled_leaves_nothing(kit: Any, base: Path, tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache", dockerfiles=True)
    cache.prepare()
    # A second user of the image owns files that its builder may not remove by itself.
    text = "FROM some/base:1\nRUN mkdir /tmp/closed && touch /tmp/closed/x && touch /began && sleep 4712\n"
    building = asyncio.create_task(cache.ready(image(base, text), await find_program(), unpacked=False))
    await kit.until(lambda: any(cache.folder.glob(".new-*/build-temp-*/rootfs/began")) or building.done(), 60)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert list(cache.folder.iterdir()) == []
    await kit.until(lambda: kit.processes_naming("sleep 4712") == [])


def test_the_command_builds_for_a_folder_of_tasks(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tasks/one/environment"
    folder.mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM some/base:1\nCOPY file /etc/file\n")
    (folder / "file").write_text("content")
    (folder.parent / "task.toml").write_text("")
    words = ["images", "build", str(tmp_path / "tasks"), "--base", f"some/base:1={base}"]
    words += ["--cache", str(tmp_path / "cache")]
    for expected in ("built in", "is there"):
        done = subprocess.run(
            [sys.executable, "-m", "rollyard", *words], capture_output=True, text=True, timeout=patience(120),
            env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, expected in done.stdout) == (0, True), done.stderr + done.stdout


EXAMPLE = Path(__file__).parents[2] / "examples/harbor/dockerfile"


def example(**files: str) -> Task:
    contents = {**read_folder(EXAMPLE), **{path: (text.encode(), False) for path, text in files.items()}}
    row = {"path": "dockerfile", "task_binary": pack(contents)}
    return Task.model_validate(HarborFormat().task(Row(row, 1)))


async def test_a_task_with_a_dockerfile_is_played(base: Path, run_dir: Path, tmp_path: Path) -> None:
    """Its image is built once where the installer allows it, and is used where he does not."""
    options = ApptainerOptions(image_cache=tmp_path / "cache", fakeroot=True)
    sandbox = {**SMALL, "images": {"debian:bookworm-slim": str(base)}}
    async with stage_lab("apptainer", run_dir / "a", apptainer=options) as lab:
        with pytest.raises(ImageNotUsable, match=r"'dockerfile:.*has not been built, and workers may not"):
            await lab.play(example(), sandbox=sandbox)
    allowed = replace(options, build_dockerfiles=True)
    async with stage_lab("apptainer", run_dir / "b", apptainer=allowed) as lab:
        solved = await lab.play(example(), sandbox=sandbox)
        assert solved.reward == 1.0, lab.observed
        (built,) = (tmp_path / "cache").glob("*.sif")
        identity = built.stat().st_ino
        with pytest.raises(DockerfileRefused, match="Dockerfile line 2: USER: another user than root"):
            await lab.play(example(**{"environment/Dockerfile": "FROM x\nUSER me"}), sandbox=sandbox)
    async with stage_lab("apptainer", run_dir / "c", apptainer=options) as lab:
        idle = await lab.play(example(), [[]], sandbox=sandbox)
        assert (idle.reward, idle.reward_reason) == (0.0, "")
    assert [path.stat().st_ino for path in (tmp_path / "cache").glob("*.sif")] == [identity]
