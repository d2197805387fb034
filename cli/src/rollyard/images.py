"""Building the images of Dockerfiles ahead of time, for `rollyard images build`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.sandboxes.apptainer.image_cache import ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import Image, dockerfile_image
from rollyard_pipeline.sandboxes.apptainer.program import find_program
from rollyard_pipeline.sandboxes.dockerfiles.instructions import DockerfileProblem
from rollyard_pipeline.sandboxes.dockerfiles.recipe import dockerfile_folders

from rollyard.errors import CliError, InvalidInput

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class NeededImage:
    """An image to build, and the names of the folders that need it."""

    image: Image
    names: tuple[str, ...]


def needed_images(folder: Path, bases: Mapping[str, str], say: Say) -> list[NeededImage]:
    """Return the images that a folder needs, each once.

    Args:
        folder: A folder with a Dockerfile, or one of task folders.
        bases: What is used instead of images that Dockerfiles name.
        say: Called with each problem, except those of the last Dockerfile with a problem.

    Raises:
        InvalidInput: A Dockerfile cannot be translated, or there is none.
    """
    images: dict[str, NeededImage] = {}
    problems: list[str] = []
    try:
        folders = dockerfile_folders(folder)
    except DockerfileProblem as error:
        raise InvalidInput(str(error)) from error
    if not folders:
        raise InvalidInput(f"{folder}: no Dockerfile, and no task folder that needs one")
    for each in folders:
        try:
            image = dockerfile_image(each.name, each.recipe(), bases)
            key = image.key()
        except PipelineError as error:
            problems.append(f"{each.name}: {error}")
            continue
        names = images[key].names if key in images else ()
        images[key] = NeededImage(image, (*names, each.name))
    for problem in problems[:-1]:
        say(problem)
    if problems:
        raise InvalidInput(problems[-1])
    return list(images.values())


def definition_of(image: Image) -> str:
    """Return the definition file of a Dockerfile's image, as built over an image that has been fetched."""
    assert image.recipe is not None
    assert image.base is not None
    base = image.base
    source = base.text.partition("://")[2] if base.kind == "registry" else str(base.path)
    scheme = base.scheme if base.kind in ("registry", "archive") else "localimage"
    return image.recipe.definition(scheme, source)


async def build_all(
    images: list[NeededImage], cache: Path, program: str | None, timeout: float, say: Say
) -> None:
    """Build the images that the cache lacks, one after the other.

    Args:
        timeout: The limit of each build in seconds.
        say: Called with a line about each image.

    Raises:
        CliError: An image could not be built. Those before it are in the cache.
    """
    image_cache = ImageCache(cache, dockerfiles=True)
    try:
        image_cache.prepare()
        apptainer = await find_program(program)
        for each in images:
            names = ", ".join(each.names)
            present, began = await image_cache.has(each.image), time.monotonic()
            async with asyncio.timeout(timeout):
                path = await image_cache.ready(each.image, apptainer, unpacked=False)
            words = "is there" if present else f"built in {time.monotonic() - began:.0f} s"
            say(f"{names}: {words}: {path}")
    except PipelineError as error:
        raise CliError(str(error)) from error
    except TimeoutError as error:
        raise CliError(f"{names}: not built within {timeout:g} s; nothing of it is left") from error


async def build_one(image: NeededImage, out: Path, program: str | None, timeout: float, say: Say) -> None:
    """Build one image into a file, unless the file is that image already.

    Raises:
        CliError: The image could not be built. The file is as it was.
    """
    notes, key = out.with_name(f"{out.name}.json"), image.image.key()
    try:
        if out.exists() and json.loads(notes.read_text())["key"] == key:
            say(f"{', '.join(image.names)}: is there: {out}")
            return
    except (OSError, ValueError, LookupError, TypeError):
        pass  # It is another file, so it is replaced.
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        await build_all([image], work, program, timeout, lambda line: None)
        os.replace(work / f"{key}.sif", out)
        notes.write_text(json.dumps({"key": key}))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"{', '.join(image.names)}: built: {out}")
