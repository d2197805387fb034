"""Bearer tokens by role, which the first start creates in a file that only the user can read.

Several tokens of a role may be valid at the same time. The first of them is the one that is handed out, and
the others are being retired. The file is read repeatedly, so tokens can be rotated without a restart.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from rollyard_crds.security.job_token import JobIdentity, job_of
from rollyard_crds.security.ready_token import ReadyIdentity, ready_worker_of

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Unauthorized

Role = Literal["admin", "worker", "driver", "metrics", "viewer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
REQUIRED: Final[tuple[Role, ...]] = ("admin", "worker", "driver")
"""The roles that a file must have. If it lacks one of the others, nobody has that role."""
MAX_FILE_BYTES: Final = 64 << 10
MAX_VALID: Final = 16
"""The largest number of tokens of one role that are valid at the same time."""
READY: Final = "ready"
"""The role of a ready worker. The token file has no such token, because each ready worker has its own."""
FILE_NAME: Final = "tokens.json"


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of the token that came with a request."""

    role: Role | Literal["ready"]
    job: JobIdentity | None = None
    """The only job for which the holder may work; None allows any job."""
    ready: ReadyIdentity | None = None
    """The holder as a ready worker, if the role is `ready`."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The valid secrets of each role, beginning with the one that is handed out."""

    by_role: Mapping[Role, tuple[str, ...]]

    def current(self, role: Role) -> str:
        """Return the secret of a role that is handed out."""
        return self.by_role[role][0]

    def caller(self, authorization: str) -> Caller:
        """Return the caller that an Authorization header identifies.

        Every token is compared, each in constant time, and the time of the answer therefore reveals nothing.

        Raises:
            Unauthorized: There is no bearer token, or the token is unknown.
        """
        scheme, _, credential = authorization.partition(" ")
        credential = credential.strip()
        if scheme.lower() != "bearer" or not credential:
            raise Unauthorized(
                "send 'Authorization: Bearer TOKEN'; the tokens are in tokens.json of the state folder",
                headers={"WWW-Authenticate": "Bearer"},
            )
        presented = credential.encode()
        matches = [
            role
            for role, valid in self.by_role.items()
            for token in valid
            if hmac.compare_digest(token.encode(), presented)
        ]
        if matches:
            return Caller(matches[0])
        jobs = [job for token in self.by_role["worker"] if (job := job_of(credential, token)) is not None]
        ready = [
            worker
            for token in self.by_role["worker"]
            if (worker := ready_worker_of(credential, token)) is not None
        ]
        if ready:
            return Caller(READY, ready=ready[0])
        if not jobs:
            raise Unauthorized("this bearer token is not known here", headers={"WWW-Authenticate": "Bearer"})
        return Caller("worker", jobs[0])


def _unusable(path: Path, problem: str) -> OptionInvalid:
    return OptionInvalid(f"{path}: {problem}", reason="TokenFileInvalid")


def load(path: Path, remedy: str = "write one string, or a list of strings, for each role") -> Tokens:
    """Read a token file.

    Args:
        path: The file.
        remedy: What to do about a file that has another form, for the message.

    Raises:
        OptionInvalid: The file cannot be read, or it does not contain such a JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(path, f"the token file cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise _unusable(path, f"the token file is longer than {MAX_FILE_BYTES} bytes")
    try:
        document = json.loads(data)
        entries = {role: document[role] for role in ROLES if role in REQUIRED or role in document}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unusable(
            path, f"must be a JSON object with the strings {', '.join(REQUIRED)}; {remedy}"
        ) from error
    by_role = {role: tuple(value if isinstance(value, list) else [value]) for role, value in entries.items()}
    for role, values in by_role.items():
        if not values or not all(isinstance(value, str) and value for value in values):
            raise _unusable(path, f"every token must be a non-empty string, and '{role}' has another")
        if len(values) > MAX_VALID:
            raise _unusable(path, f"at most {MAX_VALID} tokens of '{role}' may be valid at once")
    all_of_them = [value for values in by_role.values() for value in values]
    if len(set(all_of_them)) < len(all_of_them):
        raise _unusable(
            path, "the tokens of two roles are the same, or one is listed twice; each role needs its own"
        )
    return Tokens(by_role)


def _make(path: Path) -> None:
    document = {role: f"ry-{role}-{secrets.token_urlsafe(32)}" for role in ROLES}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        json.dump(document, file)
        file.flush()
        os.fsync(descriptor)
    try:
        # A link, unlike a rename, fails if the file exists: of two processes that start at once, the tokens
        # of the first remain.
        os.link(scratch, path)
    except FileExistsError:
        return
    finally:
        scratch.unlink()


log = logging.getLogger("rollyard.api")


class TokenFile:
    """The tokens in force. A file that cannot be used changes nothing, and is logged once.

    Args:
        state_dir: The folder whose tokens.json is created (mode 0600), with new secrets, if it is missing.
        given: Another file, which another program creates, such as a mounted Secret; None stands for
            tokens.json.

    Raises:
        OptionInvalid: The file cannot be used.
    """

    def __init__(self, state_dir: Path, path: Path | None) -> None:
        self._path = state_dir / FILE_NAME if path is None else path
        if path is None and not self._path.exists():
            _make(self._path)
        self._problem = ""
        """Why the file could not be used when it was last read."""
        self.tokens = load(self._path) if path else load(self._path, "remove it to have new tokens made")

    def look(self) -> None:
        """Read the file again. This may block, so call it in a thread."""
        try:
            tokens, problem = load(self._path), ""
        except OptionInvalid as error:
            tokens, problem = self.tokens, str(error)
        if problem and problem != self._problem:
            log.error("%s; the tokens read before stay in force", problem)
        self._problem = problem
        if tokens != self.tokens:
            changed = sorted(
                role for role in ROLES if tokens.by_role.get(role) != self.tokens.by_role.get(role)
            )
            self.tokens = tokens
            log.info("%s: other tokens are in force now for %s", self._path, ", ".join(changed))
