"""Uploads of files to the control plane, and the calls that make them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_client.call import Call, nothing

BLOBS: Final = "/v1/blobs"
PIECE_BYTES: Final = 1 << 20
ANSWER_SECONDS: Final = 120.0
"""Beyond the usual, for the server to store the last of it."""
_RAW: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when it was hashed."""

    path: Path
    size: int
    """Bytes."""
    sha256: str

    @property
    def url(self) -> str:
        """What `spec.tasks.url` of a job names it by, once it is uploaded."""
        return f"blob:sha256:{self.sha256}"

    def pieces(self) -> Iterator[bytes]:
        """Its bytes."""
        with self.path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                yield data


def hashed(path: Path) -> File:
    """A file with its SHA-256; it is read once for that.

    Raises:
        OSError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digest.update(data)
            size += len(data)
    return File(path, size, digest.hexdigest())


def has(file: File, namespace: str) -> Call[None]:
    """Whether the namespace has it already; NotFound otherwise, and of servers that take no uploads."""
    return Call("HEAD", f"{BLOBS}/{file.sha256}", nothing, query={"namespace": namespace})


def put(file: File, namespace: str) -> Call[None]:
    """NotFound only of servers that take no uploads."""
    return Call(
        "PUT",
        f"{BLOBS}/{file.sha256}",
        nothing,
        query={"namespace": namespace},
        upload=file,
        content_type=_RAW,
        wait=ANSWER_SECONDS,
    )
