"""A Dockerfile as a definition file, made by spython's parser and writer, and the files that it needs."""

from __future__ import annotations

import hashlib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rollyard_pipeline.sandboxes.dockerfiles.context import BuildContext, Copy, FolderContext
from rollyard_pipeline.sandboxes.dockerfiles.instructions import MAX_BYTES, DockerfileProblem
from rollyard_pipeline.sandboxes.dockerfiles.translation import STAGING, Translation, translate
from rollyard_pipeline.sandboxes.errors import DockerfileRefused

log = logging.getLogger(__name__)

_SILENT: Final = -9
"""A level of spython's messages at which it prints none, such as that a file is missing here."""
_VERSION: Final = "1"
"""It is part of every key. A change of it causes all images to be built again."""
MAX_FOLDERS: Final = 100_000
DOCKERFILE: Final = "Dockerfile"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that is needed to build an image, apart from its base."""

    base: str
    """The image of FROM, as the Dockerfile names it."""
    body: str
    """The definition file without its head."""
    copies: tuple[Copy, ...]
    context: BuildContext
    notes: tuple[str, ...]
    """What has no effect in a sandbox, for people."""
    digest: str
    """A digest of the body and of the files. The base is not part of it."""

    def definition(self, bootstrap: str, source: str) -> str:
        """Return the definition file over a base, which an agent of Apptainer gets from a source."""
        return f"Bootstrap: {bootstrap}\nFrom: {source}\n\n{self.body}\n"

    def write(self, folder: Path, base: Path) -> Path:
        """Write the definition file and the files it copies into a folder, from which it must be built.

        Args:
            folder: An existing folder of the caller's own.
            base: The base as a SIF file or a root folder.

        Raises:
            DockerfileRefused: A file cannot be read any more.
            OSError: A file cannot be written.
        """
        try:
            for number, copy in enumerate(self.copies):
                copy.write(self.context, folder / "context" / str(number))
        except DockerfileProblem as error:
            raise DockerfileRefused(f"Dockerfile: COPY: {error}", 1) from error
        path = folder / "definition"
        path.write_text(self.definition("localimage", str(base)))
        return path


def make_recipe(text: str, context: BuildContext) -> Recipe:
    """Translate a Dockerfile.

    Args:
        text: The Dockerfile.
        context: The files that it may copy.

    Raises:
        DockerfileRefused: Something cannot be translated faithfully. The message names the line.
        ModuleNotFoundError: spython is not installed.
    """
    translation = translate(text, context)
    body = _body(translation)
    digest = hashlib.sha256(f"{_VERSION}\0{body}".encode())
    try:
        for copy in translation.copies:
            digest.update(copy.digest(context).encode())
    except DockerfileProblem as error:
        raise DockerfileRefused(f"Dockerfile: COPY: {error}", 1) from error
    return Recipe(
        translation.base,
        body,
        tuple(translation.copies),
        context,
        tuple(translation.notes),
        digest.hexdigest(),
    )


def _body(translation: Translation) -> str:
    """Return what spython makes of the instructions, after its head.

    Raises:
        DockerfileRefused: This version of spython translates them in another way than it should.
    """
    text, parsed = spython_definition(translation.lines)
    head, _, body = text.partition("\nStage: spython-base\n")
    copies = [[f"context/{number}", f"{STAGING}/{number}"] for number in range(len(translation.copies))]
    expected = {
        "install": translation.script,
        "environ": translation.environment,
        "files": copies,
        "fromHeader": translation.base,
    }
    for name, value in expected.items():
        if (parsed.get(name) or []) != value:
            raise DockerfileRefused(
                f"Dockerfile: spython {version('spython')} translates its {name} in another way than the "
                "versions that are known; install another version of spython",
                1,
            )
    if head != f"Bootstrap: docker\nFrom: {translation.base}":
        raise DockerfileRefused("Dockerfile: FROM: spython names another image", 1)
    return body.strip("\n")


def spython_definition(lines: list[str]) -> tuple[str, Mapping[str, object]]:
    """Return the definition that spython makes of a Dockerfile's lines, and its last stage as it read it.

    Raises:
        ModuleNotFoundError: spython is not installed.
    """
    from spython.logger import bot
    from spython.main.parse.parsers import DockerParser
    from spython.main.parse.writers import SingularityWriter

    level, bot.level = bot.level, _SILENT
    try:
        parser = DockerParser(None)
        parser.lines = list(lines)
        parser.parse()
        text: str = SingularityWriter(parser.recipe).convert()
    finally:
        bot.level = level
    last: Mapping[str, object] = list(parser.recipe.values())[-1].json()
    return text, last


@dataclass(frozen=True, slots=True)
class DockerfileFolder:
    """A folder with a Dockerfile from which an image is needed."""

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
        except DockerfileProblem as error:
            raise DockerfileRefused(str(error), 1) from error
        except UnicodeDecodeError as error:
            raise DockerfileRefused("Dockerfile: is not UTF-8 text", 1) from error
        return make_recipe(text, context)


def dockerfile_folders(top: Path) -> list[DockerfileFolder]:
    """Return the folders with Dockerfiles whose images are needed, sorted.

    The result is `top` itself if it has a Dockerfile. Otherwise it is those of task folders: `environment`
    where the task's `task.toml` names no image, and `tests` where a separate verifier has no image.

    Raises:
        DockerfileProblem: A folder cannot be read, or there are too many.
    """
    if (top / DOCKERFILE).is_file():
        return [DockerfileFolder(top.resolve().name, top)]
    folders: list[DockerfileFolder] = []
    for count, folder in enumerate(_task_folders(top)):
        if count >= MAX_FOLDERS:
            raise DockerfileProblem(f"{top}: holds more than {MAX_FOLDERS} task folders", "CopyImpossible")
        name = top.resolve().name if folder == top else folder.relative_to(top).as_posix()
        folders += [
            DockerfileFolder(f"{name}/{part}", folder / part)
            for part in _without_image(folder)
            if (folder / part / DOCKERFILE).is_file() and not (folder / part).is_symlink()
        ]
    return folders


def _without_image(folder: Path) -> list[str]:
    """Return the parts of a task folder that need an image of their own and name none."""
    try:
        document = tomllib.loads((folder / "task.toml").read_text())
    except (OSError, ValueError) as error:
        raise DockerfileProblem(
            f"{folder / 'task.toml'}: cannot be read: {error}", "CopyImpossible"
        ) from error
    environment, verifier = _table(document, "environment"), _table(document, "verifier")
    separate = verifier.get("environment_mode") == "separate"
    parts = [] if environment.get("docker_image") else ["environment"]
    if separate and not _table(verifier, "environment").get("docker_image"):
        parts.append("tests")
    return parts


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def _task_folders(folder: Path) -> Iterator[Path]:
    if (folder / "task.toml").is_file():
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError as error:
        raise DockerfileProblem(f"{folder}: {error.strerror}", "CopyImpossible") from error
    for name in names:
        if not name.startswith("."):
            yield from _task_folders(folder / name)
