"""The images that a worker's installer lets jobs and tasks name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Final

from rollyard_pipeline.sandboxes.errors import SandboxImpossible

ANY: Final = "any"
NONE: Final = "none"
_REFERENCE: Final = re.compile(r"(docker|oras|library|shub)://[^\s]+")
_ARCHIVE: Final = re.compile(r"(?:docker-archive|oci-archive):(?://)?(/.*)", re.DOTALL)


class AllowedImages:
    """A list of paths and of prefixes of references, which applies to every image but the worker's default.

    A path allows itself and everything below it, once symbolic links are followed. A reference such as
    `docker://registry.example.org/team/` allows what begins with it; one that does not end with a slash also
    allows its own tags and digests. References are compared as they are written.

    Args:
        entries: Absolute paths and references. `any` allows everything, and `none` or an empty list nothing.

    Raises:
        ValueError: An entry is neither a path nor a reference, or `any` or `none` stands beside others.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        if len(entries) > 1 and (ANY in entries or NONE in entries):
            raise ValueError(f"'{ANY}' and '{NONE}' stand alone")
        self._any = ANY in entries
        listed = [entry for entry in entries if entry not in (ANY, NONE)]
        for entry in listed:
            if not os.path.isabs(entry) and not (_REFERENCE.fullmatch(entry) and _is_plain(entry)):
                raise ValueError(
                    f"{entry!r} must be the absolute path of an image or of a folder with images, a "
                    f"reference such as docker://registry.example.org/team/, {ANY} or {NONE}"
                )
        self._paths = tuple(os.path.realpath(entry) for entry in listed if os.path.isabs(entry))
        self._references = tuple(entry for entry in listed if not os.path.isabs(entry))

    def check(self, image: str | None) -> None:
        """Check the image that a job or a task names; None is the worker's default, which is always allowed.

        Raises:
            SandboxImpossible: It is not listed. Whether it exists makes no difference.
        """
        if image is None or self._any or self._allows(image):
            return
        raise SandboxImpossible(
            f"sandbox.image {image!r}: the workers of this installation may not use it; its installer lists "
            "images with --allow-image",
            "ImageNotAllowed",
        )

    def _allows(self, image: str) -> bool:
        if _REFERENCE.fullmatch(image):
            return _is_plain(image) and any(_begins(image, entry) for entry in self._references)
        archive = _ARCHIVE.fullmatch(image)
        path = archive[1] if archive else image
        if not os.path.isabs(path) or "\0" in path:
            return False
        real = os.path.realpath(path)
        return any(real == entry or real.startswith(entry.rstrip("/") + "/") for entry in self._paths)


def _is_plain(reference: str) -> bool:
    """Return whether no part of the reference could lead anywhere other than its beginning says."""
    _, _, name = reference.partition("://")
    return not name.startswith("/") and not {".", "..", ""} & set(name.rstrip("/").split("/"))


def _begins(image: str, entry: str) -> bool:
    if entry.endswith("/"):
        return image.startswith(entry)
    return image == entry or image.startswith((f"{entry}/", f"{entry}@")) or _is_tag(image, entry)


def _is_tag(image: str, entry: str) -> bool:
    """Return whether the image is the entry with a tag. A host with a port has a slash after the colon."""
    return image.startswith(f"{entry}:") and "/" not in image[len(entry) :]
