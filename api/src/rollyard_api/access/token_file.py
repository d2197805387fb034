"""The token file is read again when it changes, which allows tokens to be rotated without a restart."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rollyard_api.access import bearer_tokens
from rollyard_api.access.bearer_tokens import TokenFileError

log = logging.getLogger("rollyard.api")

_Seen = tuple[int, int, int, int, int]


class TokenFile:
    """The tokens in force. A file that cannot be used changes nothing and is logged once.

    Args:
        state_dir: The folder whose tokens.json is created if it is missing.
        given: Another file, which another program creates, such as a mounted Secret; None stands for
            tokens.json.

    Raises:
        TokenFileError: The file cannot be used.
    """

    def __init__(self, state_dir: Path, given: Path | None) -> None:
        self._path = state_dir / bearer_tokens.FILE_NAME if given is None else given
        # The content may be newer than the recorded status of the file, but never older. If it is newer, the
        # file is read once more.
        self._seen: _Seen | None = None
        self.tokens = bearer_tokens.load_or_make(state_dir) if given is None else bearer_tokens.load(given)

    def look(self) -> None:
        """Read the file again if it has changed. This may block and is therefore to be called in a thread."""
        try:
            seen = self._stat()
            if seen == self._seen:
                return
            self._seen = seen
            tokens = bearer_tokens.load(self._path)
        except OSError as error:
            if self._seen is not None:
                log.error(
                    "%s: cannot be looked at: %s; the tokens read before stay in force",
                    self._path, error.strerror,
                )  # fmt: skip
            self._seen = None
            return
        except TokenFileError as error:
            log.error("%s; the tokens read before stay in force", error)
            return
        if tokens != self.tokens:
            changed = sorted(
                role
                for role in bearer_tokens.ROLES
                if tokens.by_role.get(role) != self.tokens.by_role.get(role)
            )
            self.tokens = tokens
            log.info("%s: other tokens are in force now for %s", self._path, ", ".join(changed))

    def _stat(self) -> _Seen:
        # Links are followed, because kubelet replaces a Secret by pointing a link to another folder.
        found = os.stat(self._path)
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
