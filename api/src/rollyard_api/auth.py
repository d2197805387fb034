"""Bearer tokens: three roles, made at first start, in a file that only the user reads."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rollyard_crds.jobtoken import job_of

from rollyard_api.problems import Forbidden, Unauthorized

Role = Literal["admin", "worker", "driver"]
ROLES: tuple[Role, ...] = get_args(Role)
FILE_NAME = "tokens.json"


class TokenFileError(Exception):
    """The token file cannot be used."""

    reason = "TokenFileInvalid"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose token a request bears."""

    role: Role
    job: tuple[str, str] | None = None
    """Namespace and name of the only job that it may work for; None: any."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One secret per role."""

    admin: str
    worker: str
    driver: str

    def caller(self, authorization: str) -> Caller:
        """Who is behind an Authorization header.

        Every token is compared, each in constant time, so that the answer's time tells nothing.

        Raises:
            Unauthorized: no bearer token, or an unknown one.
        """
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthorized(
                "send 'Authorization: Bearer TOKEN'; the tokens are in tokens.json of the state folder",
                headers={"WWW-Authenticate": "Bearer"},
            )
        presented = given.strip().encode()
        matches = [role for role in ROLES if hmac.compare_digest(getattr(self, role).encode(), presented)]
        if matches:
            return Caller(matches[0])
        job = job_of(given.strip(), self.worker)
        if job is None:
            raise Unauthorized("this bearer token is not known here", headers={"WWW-Authenticate": "Bearer"})
        return Caller("worker", job)


def load_or_make(state_dir: Path) -> Tokens:
    """Read tokens.json of the state folder, or make it (mode 0600) with fresh secrets.

    Raises:
        TokenFileError: the file holds no such JSON object.
    """
    path = state_dir / FILE_NAME
    if not path.exists():
        _make(path)
    return load(path, "remove it to have new tokens made")


def load(path: Path, remedy: str = "write one string for each role") -> Tokens:
    """Read a token file that somebody else has made, such as a mounted Secret.

    Raises:
        TokenFileError: the file cannot be read, or holds no such JSON object.
    """
    try:
        document = json.loads(path.read_text())
        tokens = Tokens(**{role: document[role] for role in ROLES})
    except OSError as error:
        raise TokenFileError(f"{path}: the token file cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TokenFileError(
            f"{path}: must be a JSON object with the strings {', '.join(ROLES)}; {remedy}"
        ) from error
    values = [getattr(tokens, role) for role in ROLES]
    if not all(isinstance(value, str) and value for value in values):
        raise TokenFileError(f"{path}: every token must be a non-empty string")
    if len(set(values)) < len(values):
        raise TokenFileError(f"{path}: the tokens of two roles are the same; each role needs its own")
    return tokens


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
        # link, not rename: of two processes that start at once, the first one's tokens stand.
        os.link(scratch, path)
    except FileExistsError:
        return
    finally:
        scratch.unlink()


_LEASES = "/v1/leases"
_CLAIMS = "/v1/claims"
_JOBS = "/v1/rolloutjobs"
_POOLS = "/v1/backendpools"


def authorize(caller: Caller, method: str, path: str) -> None:
    """May this caller make this call?

    Admin may all. A worker leases, and files, reads and releases single claims. A driver reads
    everything, fulfils claims, registers, reports, cancels and deletes jobs, and owns pools. With the token
    of one job a worker leases, for that job only: the routes see to it.

    Raises:
        Forbidden: it may not.
    """
    role = caller.role
    if role == "admin" or path.startswith(_LEASES):
        return
    if caller.job is not None:
        raise Forbidden(f"the token of the workers of one job may not {method} {path}")
    allowed = _worker_may(method, path) if role == "worker" else _driver_may(method, path)
    if not allowed:
        raise Forbidden(f"the role '{role}' may not {method} {path}")


def _worker_may(method: str, path: str) -> bool:
    one = path.removeprefix(f"{_CLAIMS}/")
    if one == path:
        return method == "POST" and path == _CLAIMS
    return method in ("GET", "DELETE") and one != "" and "/" not in one


def _driver_may(method: str, path: str) -> bool:
    return (
        method in ("GET", "PUT")
        or path == _CLAIMS
        or path.startswith(f"{_CLAIMS}/")
        or (method in ("POST", "PATCH", "DELETE") and path.startswith(_POOLS))
        or (method == "DELETE" and path.startswith(f"{_JOBS}/"))
        or (method == "POST" and path.startswith(f"{_JOBS}/") and path.endswith("/cancel"))
    )
