"""The exceptions of the exec server and its client.

Every exception has a stable `reason` (CamelCase), which is also sent on the wire. The client raises the class
that `from_wire` finds for it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is slow to import, and the server must start fast.
if TYPE_CHECKING:
    from typing import Final

__all__ = [
    "BadRequest",
    "CommandTooLarge",
    "ConnectionLost",
    "FileError",
    "IPythonUnavailable",
    "LaunchError",
    "ProtocolError",
    "SandboxError",
    "SandboxSabotaged",
    "from_wire",
]


class SandboxError(Exception):
    """An error that the exec server or its client reports.

    `reason` is its stable name, such as Unauthorized if the token is missing or wrong, or ServerFault if the
    server met an exception in one request that it does not know, and survived it.
    """

    reason = "SandboxError"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class ConnectionLost(SandboxError):
    """The server is gone, does not answer, or never existed."""

    reason = "SandboxLost"


class ProtocolError(SandboxError):
    """A frame breaks the protocol: it is too large, is not JSON, or has an unknown version."""

    reason = "ProtocolError"


class BadRequest(SandboxError):
    """A well-formed frame asks for something impossible, and has changed nothing.

    The reason is BadRequest (the message names the field); SessionBusy (another command is running);
    NoCommandRunning (for input or an interrupt); or TooManySessions (the server's limit is reached).
    """

    reason = "BadRequest"


class CommandTooLarge(SandboxError):
    """The request does not fit into a frame."""

    reason = "CommandTooLarge"


class LaunchError(SandboxError):
    """A shell or program did not start. The reason is LaunchFailed, ProgramNotFound, ResourceExhausted, …"""

    reason = "LaunchFailed"


class IPythonUnavailable(SandboxError):
    """ipykernel or jupyter_client cannot be imported in the sandbox, or the kernel does not start."""

    reason = "IPythonUnavailable"


class SandboxSabotaged(SandboxError):
    """Programs of the sandbox have made its evaluation impossible. The message names the evidence."""

    reason = "SandboxSabotaged"


class FileError(SandboxError):
    """A file operation failed. The reason is FileNotFound, IsADirectory, PermissionDenied, DiskFull, …"""

    reason = "FileError"


_FILE_REASONS: Final = {
    "ENOENT": "FileNotFound",
    "EISDIR": "IsADirectory",
    "ENOTDIR": "NotADirectory",
    "EACCES": "PermissionDenied",
    "EPERM": "PermissionDenied",
    "EROFS": "ReadOnly",
    "ENOSPC": "DiskFull",
    "EDQUOT": "DiskFull",
    "EFBIG": "FileTooLarge",
    "ENAMETOOLONG": "NameTooLong",
    "ELOOP": "SymlinkLoop",
    "ENOTEMPTY": "NotEmpty",
    "EMFILE": "TooManyOpenFiles",
    "ENFILE": "TooManyOpenFiles",
    "EIO": "InputOutputError",
}

_CLASSES: Final[dict[str, type[SandboxError]]] = {
    cls.reason: cls
    for cls in (
        ConnectionLost,
        ProtocolError,
        BadRequest,
        CommandTooLarge,
        LaunchError,
        IPythonUnavailable,
        FileError,
        SandboxSabotaged,
    )
}
_CLASSES.update(dict.fromkeys(("NoCommandRunning", "SessionBusy", "TooManySessions"), BadRequest))
_CLASSES.update(dict.fromkeys(_FILE_REASONS.values(), FileError))
_CLASSES.update(dict.fromkeys(("NotAFile", "TooManyEntries", "WouldBlock"), FileError))
_CLASSES.update(dict.fromkeys(("ConfinementFailed", "ProgramNotFound", "ResourceExhausted"), LaunchError))


def file_error(error: OSError, path: str) -> FileError:
    """Return the FileError for an OSError on `path`."""
    import errno

    name = errno.errorcode.get(error.errno or 0, "")
    return FileError(f"{path}: {error.strerror or error}", reason=_FILE_REASONS.get(name))


def from_wire(reason: str, message: str) -> SandboxError:
    """Return the exception that a server's error answer stands for."""
    cls = _CLASSES.get(reason, SandboxError)
    return cls(message, reason=reason)
