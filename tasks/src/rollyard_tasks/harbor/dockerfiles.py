"""Images that a task folder does not name, because they are to be built from its Dockerfile."""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import Final

from rollyard_crds.fields.harbor import HarborFolder

from rollyard_tasks.harbor.table import HarborRefused

DOCKERFILE_IMAGE: Final = "dockerfile:"
"""The beginning of the name of such an image. A digest of the folder with the Dockerfile follows."""
_WORKDIR: Final = re.compile(r"\s*WORKDIR\s+(.+?)\s*", re.IGNORECASE)
_PLAIN: Final = re.compile(r"[A-Za-z0-9._/-]+")


def image_name(folder: HarborFolder, top: str) -> str:
    """Return the name of the image of `top/Dockerfile`, or "" if there is no such file.

    Equal files give equal names.
    """
    if not folder.has(f"{top}/Dockerfile"):
        return ""
    digest = hashlib.sha256()
    for path, (data, mode) in sorted(folder.below(top).items()):
        digest.update(f"{path}\0{mode:o}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return f"{DOCKERFILE_IMAGE}{digest.hexdigest()[:32]}"


def last_workdir(text: str) -> str:
    """Return the working folder of a Dockerfile's image, or "" if it has no WORKDIR.

    Raises:
        HarborRefused: It depends on more than the Dockerfile's own plain words.
    """
    workdir = ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _WORKDIR.fullmatch(line):
            path = match[1]
            if not _PLAIN.fullmatch(path) or not (workdir or path.startswith("/")) or ".." in path.split("/"):
                raise HarborRefused(
                    "environment/Dockerfile",
                    f"line {number}: this WORKDIR is not read; give environment.workdir in task.toml",
                )
            workdir = posixpath.join(workdir, path).rstrip("/")
    return workdir
