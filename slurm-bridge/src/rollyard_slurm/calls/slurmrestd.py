"""slurmrestd over HTTP: where it is, which API it has, and as whom it is asked."""

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
from typing import Any

import httpx

from rollyard_slurm.calls.call_counts import Load
from rollyard_slurm.errors import SlurmAway, SlurmError
from rollyard_slurm.profile import RestProfile
from rollyard_slurm.readers import job_json, reasons

OLDEST, NEWEST = 38, 46
"""v0.0.38 (Slurm 22.05) to v0.0.46 (26.05): of those that a server has the newest is used."""
MAX_BYTES = 256 * 2**20
"""Of an answer: the list of jobs has everybody's, some kilobytes each."""
CLOCK_SECONDS = 600.0
"""So long the difference of the clocks is taken to be the same."""
_VERSIONS = re.compile(r"^/slurm/(v0\.0\.(\d+))/job/submit$")
_AUTH = re.compile(r"authenticat|credential|not authorized|unauthorized", re.IGNORECASE)
_TOKEN = re.compile(r"[\w.~+/=-]{1,16384}", re.ASCII)
_COMMUNICATION = range(1800, 1807)
"""Slurm's error numbers of a controller that does not answer."""


@dataclass(frozen=True, slots=True)
class Api:
    """What the server has."""

    version: int
    """38: v0.0.38."""
    signals_batch: bool
    """It can signal a batch script alone."""
    ahead: float
    """Seconds that the controller's clock is ahead of this host's."""
    measured: float

    def now(self) -> float:
        """Seconds since the epoch on the controller's clock."""
        return time.time() + self.ahead


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    document: Any
    """Of its JSON; None: it is none."""
    numbers: list[int]
    """Slurm's error numbers."""
    words: str
    """Slurm's complaint; empty: there is none."""


class Server:
    """One slurmrestd.

    Args:
        timeout: seconds for one call.
        load: counts the calls.
    """

    def __init__(self, wanted: RestProfile, timeout: float, load: Load) -> None:
        self.url = wanted.url
        self._wanted = wanted
        self._timeout = timeout
        self._load = load
        self._api: Api | None = None
        self._tls: ssl.SSLContext | None = None

    def check(self) -> None:
        """What can be told without asking it.

        Raises:
            SlurmError: there is no such socket, or the token's file cannot be used.
        """
        path = self._wanted.socket
        if path is not None:
            try:
                if not stat.S_ISSOCK(path.stat().st_mode):
                    raise SlurmError(f"rest.url: {path} is no socket")
            except OSError as error:
                raise SlurmError(
                    f"rest.url: there is no socket {path} ({error.strerror}): does slurmrestd run here?"
                ) from error
        self._identity()

    async def api(self) -> Api:
        """What the server has; asked once, and again after it did not know a call.

        Raises:
            SlurmAway: it does not answer.
            SlurmError: it does not have the version that is wanted, or none that is known.
        """
        if self._api is None:
            answer = await self._call("GET", "/openapi/v3", {}, None, "openapi")
            if answer.status != 200 or not isinstance(answer.document, dict):
                raise self._away(answer, "openapi")
            version, signals = _chosen(answer.document, self._wanted.version, self.url)
            self._api = Api(version, signals, 0.0, float("-inf"))
        if time.monotonic() > self._api.measured + CLOCK_SECONDS:
            path = f"/slurm/v0.0.{self._api.version}/diag"
            answer = await self._call("GET", path, {}, None, "diag")
            if answer.status != 200 or answer.words:
                raise self._away(answer, "diag")
            told = job_json.number((answer.document or {}).get("statistics", {}).get("req_time"))
            ahead = 0.0 if told is None else told - time.time()
            # The controller says whole seconds.
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
    ) -> Answer:
        """One call below `/slurm/VERSION`; `name` is what it is counted as.

        Raises:
            SlurmAway: no answer, or one that says that the controller does not answer, or that the token
                is not taken.
        """
        version = (await self.api()).version
        answer = await self._call(method, f"/slurm/v0.0.{version}{path}", query or {}, body, name)
        if answer.document is None or answer.status in (401, 403) or self._means_away(answer):
            raise self._away(answer, name)
        return answer

    def _means_away(self, answer: Answer) -> bool:
        communication = any(number in _COMMUNICATION for number in answer.numbers)
        return communication or reasons.is_away(answer.words) or _AUTH.search(answer.words) is not None

    def _away(self, answer: Answer, name: str) -> SlurmAway:
        if answer.status == 404 and answer.document is None:
            self._api = None  # another Slurm than before, perhaps: its versions are asked for again
        if answer.status in (401, 403) or _AUTH.search(answer.words):
            return SlurmAway(f"slurmrestd does not take {self._who()}: {answer.words or answer.status}")
        words = answer.words or f"HTTP status {answer.status}"
        unsure = answer.status == 504 or reasons.is_unsure(words)
        return SlurmAway(f"slurmrestd ({name}): {words}", unsure)

    def _who(self) -> str:
        file = self._wanted.token_file
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

    def _identity(self) -> dict[str, str]:
        """The headers that say who asks. The file is read for each call: tokens are renewed."""
        if self._wanted.token_file is None:
            return {}
        user = self._wanted.user or pwd.getpwuid(os.getuid()).pw_name
        return {"X-SLURM-USER-NAME": user, "X-SLURM-USER-TOKEN": _token(Path(self._wanted.token_file))}

    async def _call(self, method: str, path: str, query: Mapping[str, str], body: Any, name: str) -> Answer:
        try:
            headers = self._identity()
        except SlurmError as error:
            raise SlurmAway(str(error)) from None
        began = time.monotonic()
        self._load.runs[name] = self._load.runs.get(name, 0) + 1
        try:
            async with asyncio.timeout(self._timeout):
                status, content = await self._exchange(method, path, query, body, headers)
        except TimeoutError:
            raise SlurmAway(f"slurmrestd did not answer within {self._timeout:g} s", unsure=True) from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
            raise SlurmAway(f"slurmrestd at {self.url} cannot be reached: {error}") from None
        except httpx.HTTPError as error:
            words = str(error) or type(error).__name__
            raise SlurmAway(f"slurmrestd broke off: {words}", unsure=True) from None
        finally:
            self._load.seconds += time.monotonic() - began
        return await _read(status, content)

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, str], body: Any, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        socket = self._wanted.socket
        if self._tls is None:
            secure = self.url.startswith("https:")
            # Reading the certificates takes a while: once, and only where they are used.
            self._tls = httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # A connection for each call: one that is kept may be gone when it is used again, and then nobody
        # knows whether a job was submitted.
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
                    raise SlurmAway(f"slurmrestd answers with more than {MAX_BYTES >> 20} MiB")
                chunks.append(chunk)
            return response.status_code, b"".join(chunks)


async def _read(status: int, content: bytes) -> Answer:
    try:
        # A long list of jobs would hold up everything else.
        long = len(content) > 2**20
        document = await asyncio.to_thread(json.loads, content) if long else json.loads(content)
    except ValueError:
        return Answer(status, None, [], " ".join(content[:300].decode(errors="replace").split()))
    numbers, words = job_json.troubles(document)
    return Answer(status, document, numbers, words)


def _chosen(document: Mapping[str, Any], wanted: str | None, url: str) -> tuple[int, bool]:
    """The version to use, and whether it can signal a batch script alone.

    Raises:
        SlurmError: there is none.
    """
    paths = document.get("paths")
    paths = paths if isinstance(paths, dict) else {}
    there = {int(match[2]) for path in paths if (match := _VERSIONS.match(path))}
    listed = ", ".join(f"v0.0.{number}" for number in sorted(there)) or "none that submits jobs"
    if wanted is not None:
        version = int(wanted.rpartition(".")[2])
        if version not in there:
            raise SlurmError(f"rest.version: slurmrestd at {url} has no {wanted}; it has {listed}")
    else:
        known = [number for number in there if OLDEST <= number <= NEWEST]
        newer = [number for number in there if number > NEWEST]
        if not known and not newer:
            raise SlurmError(
                f"slurmrestd at {url} has {listed}; v0.0.{OLDEST} (Slurm 22.05) or newer is needed"
            )
        version = max(known) if known else min(newer)
    delete = paths.get(f"/slurm/v0.0.{version}/job/{{job_id}}", {}).get("delete", {})
    names = {one.get("name") for one in delete.get("parameters", []) if isinstance(one, dict)}
    return version, "flags" in names


def _token(path: Path) -> str:
    """The token in a file, plain or as `scontrol token` prints it.

    Raises:
        SlurmError: it cannot be read, others can read it, or it holds none. The token is never named.
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
    """When a token ends, in seconds since the epoch; None: it does not say."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError):
        return None
