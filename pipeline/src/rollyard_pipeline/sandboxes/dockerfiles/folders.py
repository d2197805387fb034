"""The Dockerfiles of a folder: its own, or those of the task folders of Harbor below it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_pipeline.sandboxes.dockerfiles.context import ContextProblem, FolderContext
from rollyard_pipeline.sandboxes.dockerfiles.instructions import MAX_BYTES
from rollyard_pipeline.sandboxes.dockerfiles.recipe import Recipe, make_recipe
from rollyard_pipeline.sandboxes.errors import DockerfileRefused

MAX_FOLDERS: Final = 100_000
DOCKERFILE: Final = "Dockerfile"


@dataclass(frozen=True, slots=True)
class DockerfileFolder:
    """A folder with a Dockerfile that an image is needed of."""

    name: str
    """What messages call it: its path below the folder that was searched, or its own name."""
    path: Path

    def recipe(self) -> Recipe:
        """Return the translated Dockerfile.

        Raises:
            DockerfileRefused: It cannot be read or translated faithfully.
        """
        context = FolderContext(self.path)
        data = b""
        try:
            for piece in context.read(DOCKERFILE):
                data += piece
                if len(data) > MAX_BYTES:
                    break
            text = data.decode()
        except ContextProblem as error:
            raise DockerfileRefused(str(error), 1) from error
        except UnicodeDecodeError as error:
            raise DockerfileRefused("Dockerfile: is no UTF-8 text", 1) from error
        return make_recipe(text, context)


def dockerfile_folders(top: Path) -> list[DockerfileFolder]:
    """Return the folders with Dockerfiles whose images are needed, sorted.

    It is `top` itself if it has a Dockerfile. Otherwise they are those of task folders: `environment` where
    the task's `task.toml` names no image, and `tests` where a separate verifier has no image.

    Raises:
        ContextProblem: A folder cannot be read, or there are too many.
    """
    if (top / DOCKERFILE).is_file():
        return [DockerfileFolder(top.resolve().name, top)]
    found: list[DockerfileFolder] = []
    for count, folder in enumerate(_task_folders(top)):
        if count >= MAX_FOLDERS:
            raise ContextProblem(f"{top}: holds more than {MAX_FOLDERS} task folders")
        name = top.resolve().name if folder == top else folder.relative_to(top).as_posix()
        found += [
            DockerfileFolder(f"{name}/{part}", folder / part)
            for part in _without_image(folder)
            if (folder / part / DOCKERFILE).is_file() and not (folder / part).is_symlink()
        ]
    return found


def _without_image(folder: Path) -> list[str]:
    """Return the parts of a task folder that need an image of their own and name none."""
    try:
        document = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise ContextProblem(f"{folder / 'task.toml'}: cannot be read: {error}") from error
    environment, verifier = _table(document, "environment"), _table(document, "verifier")
    separate = verifier.get("environment_mode") == "separate"
    found = [] if environment.get("docker_image") else ["environment"]
    if separate and not _table(verifier, "environment").get("docker_image"):
        found.append("tests")
    return found


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _task_folders(folder: Path) -> Iterator[Path]:
    if (folder / "task.toml").is_file():
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise ContextProblem(f"{folder}: {error.strerror}") from error
    for name in names:
        if not name.startswith("."):
            yield from _task_folders(folder / name)
