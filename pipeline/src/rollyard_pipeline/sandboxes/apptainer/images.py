"""Images of Apptainer sandboxes: the meaning of `sandbox.image`, checked before anything starts."""

from __future__ import annotations

import hashlib
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE

from rollyard_pipeline.sandboxes.allowed_images import AllowedImages
from rollyard_pipeline.sandboxes.dockerfiles.context import HeldContext
from rollyard_pipeline.sandboxes.dockerfiles.recipe import Recipe, make_recipe
from rollyard_pipeline.sandboxes.errors import DockerfileRefused, ImageNotUsable
from rollyard_pipeline.sandboxes.interface import BuildFolder
from rollyard_pipeline.sandboxes.starters.root_folders import check_image

_REGISTRIES: Final = ("docker", "oras", "library", "shub")
_ARCHIVES: Final = ("docker-archive", "oci-archive")
_EXPECTED: Final = (
    "name a SIF file or a root folder by its absolute path, or docker://NAME, oras://NAME, library://NAME, "
    "docker-archive:/PATH.tar or oci-archive:/PATH.tar"
)
# A SIF begins with the text that starts it as a program, then the format's own name (SIF specification 1.0).
_SIF_MAGIC: Final = b"SIF_MAGIC\0"
_SIF_MAGIC_AT: Final = 32
_SIF_SIZES_AT: Final = 112
_SIF_HEADER_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class Image:
    """A parsed `sandbox.image`."""

    kind: Literal["sif", "folder", "archive", "registry", "dockerfile"]
    text: str
    """The text as it was given."""
    path: Path | None = None
    """The file or folder, or None for an image in a registry."""
    scheme: str = ""
    recipe: Recipe | None = None
    """How an image is built from a Dockerfile."""
    base: Image | None = None
    """The image over which a Dockerfile is built."""

    @property
    def source(self) -> str:
        """Return the source from which `apptainer build` builds."""
        return f"{self.scheme}:{self.path}" if self.kind == "archive" else self.text

    def key(self) -> str:
        """Return a name for the content, as far as it can be known without a registry.

        A tag stands for itself.

        Raises:
            ImageNotUsable: The archive cannot be read.
        """
        if self.kind == "registry":
            return _hash(self.text)
        if self.recipe is not None:
            assert self.base is not None
            return _hash("dockerfile", self.base.key(), self.recipe.digest)
        assert self.path is not None
        if self.kind == "archive":
            return _hash(self.scheme, *_archive_digests(self.text, self.path))
        status = self.path.stat()
        return _hash(str(self.path.resolve()), str(status.st_size), str(status.st_mtime_ns))


def parse_image(text: str, private: Iterable[Path] = ()) -> Image:
    """Return the image that `text` names.

    Raises:
        ImageNotUsable: Apptainer cannot start it: the kind is unknown, a file is missing or broken, or a
            folder is not a root folder or shows one of `private` (see `root_folders.check_image`).
    """
    scheme, colon, rest = text.partition(":")
    if colon and scheme in _REGISTRIES:
        name = rest.removeprefix("//")
        if not rest.startswith("//") or not name or any(letter.isspace() for letter in name):
            raise ImageNotUsable(f"sandbox.image {text!r}: {scheme}:// must be followed by the image's name")
        return Image("registry", text, scheme=scheme)
    if colon and scheme in _ARCHIVES:
        path = Path(rest.removeprefix("//"))
        _check_file(text, path)
        return Image("archive", text, path, scheme)
    if text.startswith(DOCKERFILE_IMAGE):
        raise ImageNotUsable(f"sandbox.image {text!r}: the task brings no Dockerfile of this name")
    if "://" in text:
        raise ImageNotUsable(f"sandbox.image {text!r}: Apptainer sandboxes know no {scheme}://; {_EXPECTED}")
    path = Path(text)
    if not path.is_absolute():
        raise ImageNotUsable(f"sandbox.image {text!r}: not an absolute path and no image's name; {_EXPECTED}")
    if path.is_dir():
        return Image("folder", text, check_image(text, private))
    _check_file(text, path)
    check_sif(text, path)
    return Image("sif", text, path)


def dockerfile_image(
    text: str, recipe: Recipe, bases: Mapping[str, str], private: Iterable[Path] = ()
) -> Image:
    """Return the image of a Dockerfile.

    Args:
        text: What messages call it.
        recipe: The translated Dockerfile.
        bases: What this platform has in place of images that Dockerfiles name, with or without `docker://`.
            Any other name is that of an image in a registry.
        private: See `parse_image`.

    Raises:
        ImageNotUsable: The base cannot be used.
    """
    return Image("dockerfile", text, recipe=recipe, base=parse_image(base_name(recipe, bases), private))


def base_name(recipe: Recipe, bases: Mapping[str, str]) -> str:
    """Return the image that is taken for that of FROM."""
    name = recipe.base
    return bases.get(name) or bases.get(f"docker://{name}") or f"docker://{name}"


def built_image(text: str, build: BuildFolder, allowed: AllowedImages, private: Iterable[Path] = ()) -> Image:
    """Return the image of the Dockerfile that a task brings.

    Raises:
        SandboxImpossible: The image of its FROM is not among `allowed`.
        ImageNotUsable: It cannot be translated faithfully, or its base cannot be used.
    """
    data, _ = build.files.get("Dockerfile", (b"", 0))
    try:
        dockerfile = data.decode()
    except UnicodeDecodeError as error:
        raise DockerfileRefused(f"sandbox.image {text!r}: Dockerfile: is not UTF-8 text", 1) from error
    files = {path: (content, bool(mode & 0o100)) for path, (content, mode) in build.files.items()}
    recipe = make_recipe(dockerfile, HeldContext(files))
    allowed.check(base_name(recipe, build.bases))
    return dockerfile_image(text, recipe, build.bases, private)


def check_sif(text: str, path: Path) -> None:
    """Check that the file has a SIF's header, and is as long as its header says.

    Raises:
        ImageNotUsable: It is another kind of file, or only a part of a SIF.
    """
    with path.open("rb") as file:
        head = file.read(_SIF_HEADER_BYTES)
    if head[_SIF_MAGIC_AT : _SIF_MAGIC_AT + len(_SIF_MAGIC)] != _SIF_MAGIC or len(head) < _SIF_HEADER_BYTES:
        raise ImageNotUsable(
            f"sandbox.image {text!r}: {path} is not a SIF file (`apptainer build` makes one; archives are "
            "named docker-archive:/PATH.tar or oci-archive:/PATH.tar)"
        )
    # These are the offset and length of the part that holds the data objects.
    offset, length = struct.unpack_from("<qq", head, _SIF_SIZES_AT)
    size = path.stat().st_size
    if length <= 0 or offset <= 0 or offset + length > size:
        raise ImageNotUsable(
            f"sandbox.image {text!r}: {path} is cut off: {size} bytes where its head says {offset + length}; "
            "copy or build it again"
        )


def _check_file(text: str, path: Path) -> None:
    if not path.is_absolute():
        raise ImageNotUsable(f"sandbox.image {text!r}: {str(path)!r} is not an absolute path")
    try:
        if not path.is_file():
            raise ImageNotUsable(f"sandbox.image {text!r}: no such file on this node: {path}")
        path.open("rb").close()
    except OSError as error:
        raise ImageNotUsable(f"sandbox.image {text!r}: {path} cannot be read: {error.strerror}") from error


def _archive_digests(text: str, path: Path) -> list[str]:
    """Return the digests in an archive's own index, without reading the layers."""
    try:
        with tarfile.open(path) as archive:
            for name in ("manifest.json", "index.json"):
                try:
                    member = archive.extractfile(name)
                except KeyError:
                    continue
                if member is not None:
                    document = json.loads(member.read(4 << 20))
                    if name == "index.json":
                        return [str(entry["digest"]) for entry in document["manifests"]]
                    return [str(part) for entry in document for part in (entry["Config"], *entry["Layers"])]
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise ImageNotUsable(f"sandbox.image {text!r}: {path} is not an image archive: {error}") from error
    raise ImageNotUsable(
        f"sandbox.image {text!r}: {path} has neither manifest.json nor index.json: it is not an image archive"
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
