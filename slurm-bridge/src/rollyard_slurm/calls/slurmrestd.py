"""A client of slurmrestd, which knows its address, its version of the API and the credentials of the user."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pwd
import re
import ssl
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from rollyard_slurm.calls.protocol import CallCounts
from rollyard_slurm.errors import SlurmError, SlurmUnavailable
from rollyard_slurm.profile import RestProfile
from rollyard_slurm.readers import job_json, reasons

OLDEST, NEWEST = 38, 46
"""The supported versions of the API, from v0.0.38 (Slurm 22.05) to v0.0.46 (26.05).

The client uses the newest of them that the server has.
"""
MAX_BYTES: Final = 256 * 2**20
"""The largest size of an answer. The list of jobs holds the jobs of all users, of some kilobytes each."""
CLOCK_SECONDS: Final = 600.0
"""The time for which a measured difference of the clocks is used, in seconds."""
_VERSIONS: Final = re.compile(r"^/slurm/(v0\.0\.(\d+))/job/submit$")
_AUTH: Final = re.compile(r"authenticat|credential|not authorized|unauthorized", re.IGNORECASE)
_TOKEN: Final = re.compile(r"[\w.~+/=-]{1,16384}", re.ASCII)
_COMMUNICATION: Final = range(1800, 1807)
"""The error numbers that Slurm gives if the controller does not answer."""


@dataclass(frozen=True, slots=True)
class Api:
    """A description of the server's API and clock."""

    version: int
    """The last part of the version. For example, 38 stands for v0.0.38."""
    signals_batch: bool
    """Whether the server can signal a batch script alone."""
    ahead: float
    """The number of seconds by which the controller's clock is ahead of the clock of this host."""
    measured: float
    """The monotonic time at which `ahead` was measured."""

    def now(self) -> float:
        """Return the present time on the controller's clock, in seconds since the epoch."""
        return time.time() + self.ahead


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """The answer to one call."""

    status: int
    document: Any
    """The decoded JSON, or None if the answer is not JSON."""
    numbers: list[int]
    """The error numbers that Slurm gave in the answer."""
    words: str
    """The error message that Slurm gave in the answer. It is empty if there is none."""


class SlurmrestdClient:
    """A client of one slurmrestd.

    Args:
        profile: The address and the credentials of slurmrestd.
        timeout: The time limit of one call, in seconds.
        counts: The counts to which each call is added.
    """

    def __init__(self, profile: RestProfile, timeout: float, counts: CallCounts) -> None:
        self.url = profile.url
        self._profile = profile
        self._timeout = timeout
        self._counts = counts
        self._api: Api | None = None
        self._tls: ssl.SSLContext | None = None

    def check(self) -> None:
        """Check the socket and the file with the token, which needs no call.

        Raises:
            SlurmError: The socket does not exist, or the file with the token cannot be used.
        """
        path = self._profile.socket
        if path is not None:
            try:
                if not stat.S_ISSOCK(path.stat().st_mode):
                    raise SlurmError(f"rest.url: {path} is not a socket")
            except OSError as error:
                raise SlurmError(
                    f"rest.url: there is no socket {path} ({error.strerror}): does slurmrestd run here?"
                ) from error
        self._credentials()

    async def api(self) -> Api:
        """Return the API of the server.

        The server is asked for its version once, and again after a call that it did not know. Its clock is
        measured again when the last measurement is too old.

        Raises:
            SlurmUnavailable: The server does not answer.
            SlurmError: The server does not have the wanted version, or has no supported one.
        """
        if self._api is None:
            answer = await self._call("GET", "/openapi/v3", {}, None, "openapi")
            if answer.status != 200 or not isinstance(answer.document, dict):
                raise self._unavailable(answer, "openapi")
            version, signals = _chosen(answer.document, self._profile.version, self.url)
            self._api = Api(version, signals, 0.0, float("-inf"))
        if time.monotonic() > self._api.measured + CLOCK_SECONDS:
            path = f"/slurm/v0.0.{self._api.version}/diag"
            answer = await self._call("GET", path, {}, None, "diag")
            if answer.status != 200 or answer.words:
                raise self._unavailable(answer, "diag")
            controller_time = job_json.number((answer.document or {}).get("statistics", {}).get("req_time"))
            ahead = 0.0 if controller_time is None else controller_time - time.time()
            # The controller gives its time in whole seconds, so smaller differences mean nothing.
            ahead = 0.0 if abs(ahead) < 2.0 else ahead
            self._api = Api(self._api.version, self._api.signals_batch, ahead, time.monotonic())
        return self._api

    async def ask(
        self,
        method: str,
        path: str,
        name: str,
        query: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> RestAnswer:
        """Make one call below `/slurm/VERSION`.

        Args:
            method: The HTTP method.
            path: The rest of the path.
            name: The name under which the call is counted.
            query: The parameters of the URL.
            body: A document that is sent as JSON, or None for no body.

        Raises:
            SlurmUnavailable: There is no answer, the controller does not answer, or the token is not
                accepted.
        """
        version = (await self.api()).version
        answer = await self._call(method, f"/slurm/v0.0.{version}{path}", query or {}, body, name)
        if answer.document is None or answer.status in (401, 403) or self._says_unavailable(answer):
            raise self._unavailable(answer, name)
        return answer

    def _says_unavailable(self, answer: RestAnswer) -> bool:
        """Return whether an answer says that Slurm does not answer or does not accept the credentials."""
        communication = any(number in _COMMUNICATION for number in answer.numbers)
        return communication or reasons.is_unavailable(answer.words) or _AUTH.search(answer.words) is not None

    def _unavailable(self, answer: RestAnswer, name: str) -> SlurmUnavailable:
        """Return the exception for an answer that cannot be used."""
        if answer.status == 404 and answer.document is None:
            self._api = None  # Perhaps Slurm was upgraded, so the next call asks for its versions.
        if answer.status in (401, 403) or _AUTH.search(answer.words):
            return SlurmUnavailable(
                f"slurmrestd does not take {self._who()}: {answer.words or answer.status}"
            )
        words = answer.words or f"HTTP status {answer.status}"
        unsure = answer.status == 504 or reasons.is_unsure(words)
        return SlurmUnavailable(f"slurmrestd ({name}): {words}", unsure)

    def _who(self) -> str:
        """Return a description of the credentials for messages, which says whether the token has expired."""
        file = self._profile.token_file
        if file is None:
            return "a call without a token (rest.tokenFile names a file with one)"
        try:
            ends = _expiry(_token(Path(file)))
        except SlurmError:
            ends = None
        if ends is not None and ends < time.time():
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(ends))
            return f"the token in {file}, which has expired ({when} UTC)"
        return f"the token in {file}; it may have expired"

    def _credentials(self) -> dict[str, str]:
        """Return the headers with the credentials.

        The token is read for each call, because its file may have been renewed.
        """
        if self._profile.token_file is None:
            return {}
        user = self._profile.user or pwd.getpwuid(os.getuid()).pw_name
        return {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": _token(Path(self._profile.token_file))}

    async def _call(
        self, method: str, path: str, query: Mapping[str, str], body: Any, name: str
    ) -> RestAnswer:
        """Make and count one call.

        Raises:
            SlurmUnavailable: There is no answer, or the token cannot be read.
        """
        try:
            headers = self._credentials()
        except SlurmError as error:
            raise SlurmUnavailable(str(error)) from None
        began = time.monotonic()
        self._counts.count(name)
        try:
            async with asyncio.timeout(self._timeout):
                status, content = await self._exchange(method, path, query, body, headers)
        except TimeoutError:
            raise SlurmUnavailable(
                f"slurmrestd did not answer within {self._timeout:g} s", unsure=True
            ) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            raise SlurmUnavailable(f"slurmrestd at {self.url} cannot be reached: {error}") from None
        except httpx.HTTPError as error:
            words = str(error) or type(error).__name__
            raise SlurmUnavailable(f"slurmrestd broke off: {words}", unsure=True) from None
        finally:
            self._counts.seconds += time.monotonic() - began
        return await _read(status, content)

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, str], body: Any, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send one request, and return the HTTP status and the content of the answer."""
        socket = self._profile.socket
        if self._tls is None:
            secure = self.url.startswith("https:")
            # Reading the certificates takes a while. Therefore they are read once, and only if they are
            # needed.
            self._tls = httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Each call has a connection of its own. A connection that is used again may already be closed, and
        # then it is unknown whether a job was submitted.
        carrier = httpx.AsyncHTTPTransport(
            verify=self._tls, uds=None if socket is None else str(socket), trust_env=False
        )
        base = "http://slurmrestd" if socket is not None else self.url.rstrip("/")
        content = None if body is None else json.dumps(body).encode()
        sent = {**headers, "Accept": "application/json"}
        if content is not None:
            sent["Content-Type"] = "application/json"
        async with (
            httpx.AsyncClient(transport=carrier, trust_env=False, timeout=None) as http,
            http.stream(method, base + path, params=dict(query), content=content, headers=sent) as response,
        ):
            chunks, size = [], 0
            async for chunk in response.aiter_bytes():
                size += len(chunk)
                if size > MAX_BYTES:
                    raise SlurmUnavailable(f"slurmrestd answers with more than {MAX_BYTES >> 20} MiB")
                chunks.append(chunk)
            return response.status_code, b"".join(chunks)


async def _read(status: int, content: bytes) -> RestAnswer:
    """Decode the content of an answer."""
    try:
        # A long list of jobs is decoded in a thread, because decoding it here would block the event loop.
        long = len(content) > 2**20
        document = await asyncio.to_thread(json.loads, content) if long else json.loads(content)
    except ValueError:
        return RestAnswer(status, None, [], " ".join(content[:300].decode(errors="replace").split()))
    numbers, words = job_json.troubles(document)
    return RestAnswer(status, document, numbers, words)


def _chosen(document: Mapping[str, Any], version: str | None, url: str) -> tuple[int, bool]:
    """Return the version to use, and whether it can signal a batch script alone.

    Raises:
        SlurmError: The server has no version that can be used.
    """
    paths = document.get("paths")
    paths = paths if isinstance(paths, dict) else {}
    there = {int(match[2]) for path in paths if (match := _VERSIONS.match(path))}
    listed = ", ".join(f"v0.0.{each}" for each in sorted(there)) or "none that submits jobs"
    if version is not None:
        number = int(version.rpartition(".")[2])
        if number not in there:
            raise SlurmError(f"rest.version: slurmrestd at {url} has no {version}; it has {listed}")
    else:
        known = [each for each in there if OLDEST <= each <= NEWEST]
        newer = [each for each in there if each > NEWEST]
        if not known and not newer:
            raise SlurmError(
                f"slurmrestd at {url} has {listed}; v0.0.{OLDEST} (Slurm 22.05) or newer is needed"
            )
        number = max(known) if known else min(newer)
    delete = paths.get(f"/slurm/v0.0.{number}/job/{{job_id}}", {}).get("delete", {})
    names = {
        parameter.get("name") for parameter in delete.get("parameters", []) if isinstance(parameter, dict)
    }
    return number, "flags" in names


def _token(path: Path) -> str:
    """Return the token in a file.

    The file holds the token alone, or a line as `scontrol token` prints it.

    Raises:
        SlurmError: The file cannot be read, other users can read it, or it holds no token.
    """
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            text = file.read(2**15).decode(errors="replace").strip()
    except OSError as error:
        raise SlurmError(f"rest.tokenFile: {path} cannot be read: {error.strerror}") from None
    if about.st_mode & 0o077:
        raise SlurmError(f"rest.tokenFile: others may read {path}: chmod 600 {path}")
    token = text.removeprefix("SLURM_JWT=")
    if not _TOKEN.fullmatch(token):
        raise SlurmError(f"rest.tokenFile: {path} holds no token, as `scontrol token` prints one")
    return token


def _expiry(token: str) -> float | None:
    """Return the time at which a token expires, in seconds since the epoch, or None if it names none."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError):
        return None
