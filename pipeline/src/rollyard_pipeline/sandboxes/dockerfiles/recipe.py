"""A Dockerfile as a definition file, made by spython's parser and writer, and the files that it needs.

A Dockerfile is first translated to instructions that spython translates faithfully; everything else is
refused. spython writes the words of each RUN into one script, in which a `cd` or `export` lasts and a failure
before `&&` is overlooked, and copies all files before the first command. Docker does none of this. Therefore
every RUN becomes a shell of its own, every variable is exported, and files are copied to a folder from which
the script takes them in the right order.
"""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from rollyard_pipeline.sandboxes.dockerfiles.context import (
    BuildContext,
    ContextFile,
    Copy,
    FolderContext,
    copied,
)
from rollyard_pipeline.sandboxes.dockerfiles.instructions import (
    MAX_BYTES,
    DockerfileProblem,
    ImageVariable,
    Instruction,
    Value,
    check_instruction,
    expand,
    literal,
    quoted,
    read_dockerfile,
    split_words,
)
from rollyard_pipeline.sandboxes.errors import DockerfileRefused

STAGING: Final = "/.rollyard-build"
"""The folder of the image from which the script takes what COPY brings. It is removed at the end."""
_ROOT: Final = re.compile(r"(root|0)(:(root|0))?")
_BASE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,511}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH: Final = re.compile(r"[A-Za-z0-9._/+@=,:-]+")
_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
_ARCHIVE: Final = re.compile(r"\.(tar|tgz|tbz2?|txz|tzst|gz|gzip|bz2|xz|zst)$", re.IGNORECASE)
_OTHERS: Final = ("/work", "/dev", "/proc", "/sys", "/.singularity.d", "/.rollyard", STAGING)
_PASSING: Final = ("/tmp", "/var/tmp")
_WITHOUT_EFFECT: Final = {
    "CMD": "a sandbox starts Rollyard's exec server",
    "ENTRYPOINT": "a sandbox starts Rollyard's exec server",
    "EXPOSE": "a sandbox has no network of its own",
    "HEALTHCHECK": "a sandbox has checks of its own",
    "LABEL": "a sandbox reads no labels",
    "MAINTAINER": "a sandbox reads no labels",
    "STOPSIGNAL": "a sandbox is ended as a whole",
    "VOLUME": "a sandbox has no volumes",
}


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


@dataclass(slots=True)
class Translation:
    """A Dockerfile in instructions that spython translates as they stand."""

    base: str = ""
    """The image of FROM, as the Dockerfile names it."""
    lines: list[str] = field(default_factory=list)
    """The instructions for spython, one per line."""
    script: list[str] = field(default_factory=list)
    """The lines of the build script that spython must make of them."""
    environment: list[str] = field(default_factory=list)
    """The variables of the image, as `NAME="VALUE"`, that spython must make of them."""
    copies: list[Copy] = field(default_factory=list)
    """What each COPY brings, in the order of their numbers."""
    notes: list[str] = field(default_factory=list)
    """What has no effect in a sandbox."""
    workdir: str | None = None
    """The last WORKDIR, or None if there is none."""


def translate(text: str, context: BuildContext) -> Translation:
    """Translate a Dockerfile.

    Raises:
        DockerfileRefused: Something in it cannot be translated faithfully. The message names the line.
    """
    return _Translator(context).run(read_dockerfile(text))


class _Translator:
    def __init__(self, context: BuildContext) -> None:
        self._context = context
        self._files: dict[str, ContextFile] | None = None
        self._translation = Translation()
        self._globals: dict[str, Value] = {}
        self._arguments: dict[str, Value] = {}
        self._variables: dict[str, Value] = {}

    def run(self, instructions: list[Instruction]) -> Translation:
        steps = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "RUN": self._run,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ADD": self._copy,
            "USER": self._user,
        }
        for each in instructions:
            check_instruction(each)
            if not self._translation.base and each.keyword not in ("FROM", "ARG"):
                raise each.refused("stands before FROM")
            try:
                if each.keyword in _WITHOUT_EFFECT:
                    words = f"has no effect: {_WITHOUT_EFFECT[each.keyword]}"
                    self._translation.notes.append(f"Dockerfile line {each.line}: {each.keyword} {words}")
                elif each.keyword in steps:
                    steps[each.keyword](each)
                else:
                    if each.keyword in ("SHELL", "ONBUILD"):
                        raise each.refused("is not translated; spython would run it as a command")
                    raise each.refused("is not an instruction of a Dockerfile")
            except DockerfileProblem as error:
                raise each.refused(str(error)) from error
        if not self._translation.base:
            raise DockerfileRefused("Dockerfile: has no FROM", 1)
        if self._translation.copies:
            self._command(f"rm -rf {STAGING}")
        return self._translation

    def _line(self, line: str, *script: str) -> None:
        self._translation.lines.append(line)
        self._translation.script += script

    def _command(self, command: str) -> None:
        self._line(f"RUN {command}", command)

    def _argument(self, name: str) -> Value | None:
        """Return a variable's value for instructions that need it now. ENV comes before ARG."""
        value = self._variables.get(name, self._arguments.get(name))
        if value is None:
            raise DockerfileProblem(f"${name} has no value in the Dockerfile; only the image could know it")
        return value

    def _from(self, each: Instruction) -> None:
        if self._translation.base:
            raise each.refused("a second stage is not translated; spython would mix up or merge the stages")
        words = split_words(each.text)
        if words and words[0].startswith("--"):
            raise each.refused(f"{words[0][:60]} is not translated; spython would take it for the image")
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise each.refused("expected an image, or an image AS a name")

        def lookup(name: str) -> Value:
            if name not in self._globals:
                raise DockerfileProblem(f"${name} has no value: no ARG before it gives one")
            return self._globals[name]

        base = literal(expand(words[0], lookup))
        if base == "scratch":
            raise each.refused("scratch is not an image that can be started, and spython would look it up")
        if not _BASE.fullmatch(base):
            raise each.refused(f"{base[:100]!r} is not a name of an image")
        self._translation.base = base
        self._translation.lines.append(f"FROM {base}")
        self._command("umask 022")

    def _arg(self, each: Instruction) -> None:
        for word in split_words(each.text):
            name, equals, default = word.partition("=")
            if not _NAME.fullmatch(name):
                raise each.refused(f"{name[:60]!r} is not a name of a variable")
            if not self._translation.base:
                if not equals:
                    raise each.refused(f"{name} has no default, and nothing else gives it a value")
                self._globals[name] = expand(default, lambda name: self._globals.get(name, ()))
                continue
            if not equals and name not in self._globals:
                raise each.refused(f"{name} has no default, and nothing else gives it a value")
            value = expand(default, self._argument) if equals else self._globals[name]
            self._arguments[name] = value
            if name not in self._variables:
                self._command(f"export {name}={shlex.quote(literal(value))}")

    def _env(self, each: Instruction) -> None:
        words = split_words(each.text)
        if not words:
            raise each.refused("expected NAME=VALUE")
        pairs = [word.partition("=")[::2] for word in words]
        if "=" not in words[0]:  # The old form is a name and the rest of the line.
            pairs = [(words[0], each.text.strip()[len(words[0]) :].strip())]
            if not pairs[0][1]:
                raise each.refused(f"{words[0][:60]} has no value")
        elif any("=" not in word for word in words):
            raise each.refused("expected NAME=VALUE only")
        before = dict(self._variables)
        set_here: set[str] = set()

        def lookup(name: str) -> Value:
            known = before.get(name, self._arguments.get(name))
            if known is not None and not any(isinstance(part, ImageVariable) for part in known):
                return known
            if name in set_here:
                raise DockerfileProblem(f"${name} is set on the same line; write another ENV for it")
            return (ImageVariable(name),)

        for name, value in pairs:
            if not _NAME.fullmatch(name):
                raise each.refused(f"{name[:60]!r} is not a name of a variable")
            self._variables[name] = expand(value, lookup)
            set_here.add(name)
            assignment = f"{name}={quoted(self._variables[name])}"
            self._line(f"ENV {assignment}", assignment)
            self._translation.environment.append(assignment)
            self._command(f"export {name}")

    def _run(self, each: Instruction) -> None:
        if not each.text:
            raise each.refused("has no command")
        self._command(f"/bin/sh -c {shlex.quote(each.text)}")

    def _workdir(self, each: Instruction) -> None:
        folder = literal(expand(each.text, self._argument))
        if not folder or not _PATH.fullmatch(folder):
            raise each.refused(f"{folder[:100]!r} has a character that is not translated")
        if not folder.startswith("/") and self._translation.workdir is None:
            raise each.refused("a relative path needs a WORKDIR before it; only the image knows its own")
        path = posixpath.normpath(posixpath.join(self._translation.workdir or "/", folder))
        self._translation.workdir = "/" + path.lstrip("/")
        where = self._translation.workdir
        self._line(f"WORKDIR {where}", f"mkdir -p {where}", f"cd {where}")

    def _user(self, each: Instruction) -> None:
        if not _ROOT.fullmatch(each.text):
            raise each.refused("another user than root is not translated; spython would give it no effect")

    def _copy(self, each: Instruction) -> None:
        words = [literal(expand(word, self._argument)) for word in split_words(each.text)]
        if len(words) < 2:
            raise each.refused("expected at least one source and a target")
        *sources, target = words
        files = self._listed(each)
        chosen: dict[str, ContextFile] = {}
        folders = 0
        for source in sources:
            path = _source(each, source)
            below, folder = copied(files, path)
            folders += folder
            if each.keyword == "ADD" and not folder and self._is_archive(path):
                raise each.refused(
                    f"{source}: an archive, which spython would not unpack; unpack it in a RUN"
                )
            chosen |= below
        tops = {path[:at] for path in chosen for at, letter in enumerate(path) if letter == "/"}
        if both := sorted(tops & chosen.keys()):
            raise each.refused(f"{both[0]}: is a file of one source and a folder of another one")
        where = self._target(each, target)
        if len(sources) > 1 and not target.endswith("/"):
            raise each.refused(f"{target}: a target of several sources must end with /")
        number = len(self._translation.copies)
        self._translation.copies.append(Copy(chosen))
        staged = f"{STAGING}/{number}"
        self._line(f"COPY context/{number} {staged}")
        if folders or target.endswith(("/", "/.")) or target == ".":
            # The folder itself keeps its mode and owner, so only what is in it is copied.
            self._command(f"mkdir -p {where}")
            self._command(
                f"for each in {staged}/* {staged}/.[!.]* {staged}/..?*; do "
                f'if [ -e "$each" ]; then cp -a "$each" {where}/ || exit 1; fi; done'
            )
        else:
            # A target that is a folder of the image gets the file into it.
            name = shlex.quote(f"{staged}/{next(iter(chosen))}")
            self._command(f"mkdir -p {posixpath.dirname(where)}")
            self._command(f"cp -a {name} {where}")

    def _is_archive(self, path: str) -> bool:
        if _ARCHIVE.search(path):
            return True
        head = next(self._context.read(path), b"")[:512]
        return head.startswith(_COMPRESSED) or head[257:262] == b"ustar"

    def _listed(self, each: Instruction) -> dict[str, ContextFile]:
        if self._files is None:
            self._files = dict(self._context.files())
        for name in (".dockerignore", "Dockerfile.dockerignore"):
            if name in self._files:
                raise each.refused(f"{name} is not translated; remove it, and what it names")
        return self._files

    def _target(self, each: Instruction, target: str) -> str:
        if not _PATH.fullmatch(target) or ".." in target.split("/"):
            raise each.refused(f"the target {target[:100]!r} has a character or '..', not translated")
        if not target.startswith("/") and self._translation.workdir is None:
            raise each.refused("a relative target needs a WORKDIR before it; only the image knows its own")
        where = "/" + posixpath.normpath(posixpath.join(self._translation.workdir or "/", target)).lstrip("/")
        for top in _OTHERS:
            if where == top or where.startswith(f"{top}/"):
                raise each.refused(f"{top} of a sandbox is its own and hides that of its image")
        for top in _PASSING:
            if where == top or where.startswith(f"{top}/"):
                words = f"{each.keyword}: {top} of a sandbox is empty; the files are there in the build only"
                self._translation.notes.append(f"Dockerfile line {each.line}: {words}")
        return where


def _source(each: Instruction, source: str) -> str:
    """Return the path of a source below the folder."""
    if re.match(r"[a-z][a-z0-9+.-]*://|git@", source, re.IGNORECASE):
        raise each.refused(f"{source[:100]}: a URL is not translated; spython would need curl in the image")
    if re.search(r"[*?\[\\]", source):
        raise each.refused(f"{source[:100]}: a pattern is not translated; name the files or their folder")
    parts = source.strip("/").split("/")
    if ".." in parts:
        raise each.refused(f"{source[:100]}: leads out of the folder of the Dockerfile")
    return "/".join(part for part in parts if part not in ("", "."))
