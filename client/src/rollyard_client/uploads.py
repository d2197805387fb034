"""Files to upload to the control plane, and the calls that upload them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from rollyard_client.call import Call, File, nothing

BLOBS: Final = "/v1/blobs"
ANSWER_SECONDS: Final = 120.0
"""The seconds beyond the usual timeout that the server may take to store the end of the file."""
_RAW: Final = "application/octet-stream"


def hashed(path: Path) -> File:
    """Return a file with its SHA-256. The whole file is read once for that.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return File(path, file.tell(), digest.hexdigest())


def has(file: File, namespace: str) -> Call[None]:
    """Return the call that succeeds if the namespace has the file already. It raises NotFound otherwise."""
    return Call("HEAD", f"{BLOBS}/{file.sha256}", nothing, query={"namespace": namespace})


def put(file: File, namespace: str) -> Call[None]:
    """Return the call that uploads the file."""
    return Call(
        "PUT",
        f"{BLOBS}/{file.sha256}",
        nothing,
        query={"namespace": namespace},
        upload=file,
        content_type=_RAW,
        wait=ANSWER_SECONDS,
    )
