"""The control plane as a subprocess, which is started, awaited, and restarted on the same port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from rollyard_client.unixsocket import base_of, socket_of, socket_url
from rollyard_process.backoff import Backoff

from rollyard_drivers.host.child import Child, Folders
from rollyard_drivers.host.errors import StartFailed
from rollyard_drivers.host.home import Home, read_json
from rollyard_drivers.host.private_files import write_private
from rollyard_drivers.host.ready_processes import ReadyProcesses

NAME: Final = "control-plane"
PROGRAM: Final = "rollyard_api"
"""The package that is run as the control plane."""
READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.05
_RESTARTS: Final = Backoff(first=0.5, longest=15.0)
USEFUL_SECONDS: Final = 3.0
"""A control plane that was ready for this many seconds has done useful work, and is restarted at once."""


@dataclass(frozen=True, slots=True)
class ControlPlaneSettings:
    """The settings that a control plane is started with."""

    host: str
    """The address that the control plane listens on and is reached at from this machine, or the path of a
    Unix socket."""
    port: int
    """The port to listen on. The value 0 selects a free port."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its further options, by their names in files, as `rollyard_api.options.declared.document` returns them.
    They may hold passwords."""

    @property
    def scheme(self) -> str:
        """The scheme of its URL, `https` if it has a certificate."""
        return "https" if self.options.get("tls-cert") else "http"

    @property
    def tokens_file(self) -> Path | None:
        """The file of tokens, if it is not the one in the state folder."""
        file = self.options.get("tokens")
        return None if file is None else Path(str(file))

    @property
    def prorl(self) -> tuple[str, int] | None:
        """The address and the port of the ProRL calls, or None if they are off. Port 0 selects a free one."""
        if not self.options.get("prorl"):
            return None
        return str(self.options["prorl-host"]), int(self.options["prorl-port"])


class HostedControlPlane(Protocol):
    """A control plane as a driver uses it."""

    @property
    def url(self) -> str:
        """The base URL of the control plane."""

    @property
    def port(self) -> int:
        """The port on which it listens."""

    def token(self, role: str) -> str:
        """Return the token of a role."""

    async def start(self) -> None:
        """Start the control plane, or connect to it, and return once it is ready."""

    async def keep(self, wake: Callable[[], None]) -> None:
        """Keep the control plane running until cancelled, and call `wake` after each restart."""

    async def stop(self, grace_seconds: float) -> None:
        """Stop the control plane if it was started here."""


class JoinedControlPlane:
    """A control plane that runs elsewhere, such as an installation on Kubernetes.

    Args:
        url: The base URL of the control plane.
        tokens: The path of a JSON file with the tokens of the driver and the worker.
        http: The client that sends the requests.
    """

    def __init__(self, url: str, tokens: Path, http: httpx.AsyncClient) -> None:
        self.url = url.rstrip("/")
        self.port = 0
        self._tokens = tokens
        self._http = http

    def token(self, role: str) -> str:
        """Return the bearer token of a role.

        Raises:
            StartFailed: The file cannot be read, or holds no token for the role.
        """
        return token_in(self._tokens, role)

    async def start(self) -> None:
        """Check that the control plane answers.

        Raises:
            StartFailed: The control plane does not answer, or is not ready.
        """
        try:
            answer = await self._http.get(f"{self.url}/readyz", timeout=10.0)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise StartFailed(f"the control plane at {self.url} is not ready: {error}") from error

    async def keep(self, wake: Callable[[], None]) -> None:
        """Do nothing, because the installation that runs the control plane restarts it."""

    async def stop(self, grace_seconds: float) -> None:
        """Do nothing, because the installation that runs the control plane stops it."""


def token_in(path: Path, role: str) -> str:
    """Return the token of a role in a file of tokens. If there are several, return the first.

    Raises:
        StartFailed: The file holds no token for the role.
    """
    token = (read_json(path) or {}).get(role)
    if isinstance(token, list) and token:
        token = token[0]
    if not isinstance(token, str):
        raise StartFailed(f"{path} holds no token for the role {role!r}")
    return token


class ControlPlaneProcess:
    """A `python -m rollyard_api` process, which keeps its port when it is restarted.

    Args:
        home: The folders of the state, the log and the pid file.
        settings: The settings of the control plane.
        http: The client that asks whether the control plane is ready.
        ready: The processes that stand ready. By default there are none.
    """

    def __init__(
        self,
        home: Home,
        settings: ControlPlaneSettings,
        http: httpx.AsyncClient,
        ready: ReadyProcesses | None = None,
    ) -> None:
        self._home = home
        self._ready = ready or ReadyProcesses(Folders(home.logs, home.pids), ())
        self._settings = settings
        self._http = http
        self._port = settings.port
        self._prorl_port = 0 if settings.prorl is None else settings.prorl[1]
        self._child: Child | None = None
        self._ended = asyncio.Event()
        self.restarts = 0

    @property
    def url(self) -> str:
        """The base URL. It is valid once the control plane has started."""
        host = self._settings.host
        if host.startswith("/"):
            return socket_url(host)
        scheme = self._settings.scheme
        return f"{scheme}://[{host}]:{self._port}" if ":" in host else f"{scheme}://{host}:{self._port}"

    @property
    def port(self) -> int:
        """The port that the control plane listens on. It is valid once the control plane has started."""
        return self._port

    @property
    def prorl_url(self) -> str:
        """The base URL of the ProRL calls once the process has started, or "" if they are off."""
        if self._settings.prorl is None:
            return ""
        host, _ = self._settings.prorl
        return f"http://[{host}]:{self._prorl_port}" if ":" in host else f"http://{host}:{self._prorl_port}"

    def token(self, role: str) -> str:
        """Return the bearer token of a role.

        Raises:
            StartFailed: The file tokens.json cannot be read, or holds no token for the role.
        """
        return token_in(self.tokens_file, role)

    @property
    def tokens_file(self) -> Path:
        """The file of the tokens."""
        return self._settings.tokens_file or self._home.state / "tokens.json"

    async def start(self) -> None:
        """Start the control plane and wait until it is ready.

        Raises:
            StartFailed: The process ended, or was not ready within a minute. The message of the former
                contains the last line of its log.
        """
        port_file = self._home.pids / f"{NAME}.port"
        port_file.unlink(missing_ok=True)
        self._ended.clear()
        # No password is in a command line, which every user of this machine can read.
        file = self._home.state / "control-plane.json"
        arguments = [
            *("--config", str(file), "--state-dir", str(self._home.state), "--host", self._settings.host),
            *("--port", str(self._port), "--port-file", str(port_file)),
            *self._prorl_arguments(),
        ]
        try:
            write_private(file, json.dumps(dict(self._settings.options)))
            child = await self._ready.start(PROGRAM, NAME, arguments, on_exit=self._ended.set)
        except OSError as error:
            raise StartFailed(f"the control plane cannot be started: {error}") from error
        self._child = child
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._is_ready(port_file.exists() and port_file.read_text().strip()):
                    if child.exit_code is not None:
                        raise StartFailed(self._last_words(child))
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            await child.stop(2.0)
            raise StartFailed(
                f"the control plane was not ready within {READY_SECONDS:.0f} s; see {self._log}"
            ) from None

    def _prorl_arguments(self) -> list[str]:
        if self._settings.prorl is None:
            return []
        self._prorl_port_file.unlink(missing_ok=True)
        # After a restart the port is the one that was free at the start.
        return ["--prorl-port", str(self._prorl_port), "--prorl-port-file", str(self._prorl_port_file)]

    @property
    def _prorl_port_file(self) -> Path:
        return self._home.pids / f"{NAME}.prorl-port"

    @property
    def _log(self) -> str:
        return str(self._home.logs / f"{NAME}.log")

    def _last_words(self, child: Child) -> str:
        words = child.last_line or f"it said nothing; exit status {child.exit_code}"
        return f"the control plane did not start: {words} (log: {self._log})"

    async def _is_ready(self, port: str | bool) -> bool:
        if not port:
            return False
        self._port = int(port)
        try:
            answer = await self._ask("/readyz")
        except httpx.HTTPError:
            return False
        if answer.is_success and self._settings.prorl is not None:
            # The control plane opens this port before its own.
            self._prorl_port = int(self._prorl_port_file.read_text())
        return answer.is_success

    async def _ask(self, path: str) -> httpx.Response:
        socket = socket_of(self.url)
        if socket is None:
            return await self._http.get(f"{self.url}{path}", timeout=2.0)
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket)) as http:
            return await http.get(f"{base_of(self.url)}{path}", timeout=2.0)

    async def keep(self, wake: Callable[[], None]) -> None:
        """Restart the control plane whenever it dies, until this task is cancelled.

        The pause before a restart grows with each end in a row that came before useful work.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            ready = loop.time()
            await self._ended.wait()
            if loop.time() - ready >= USEFUL_SECONDS:
                failures = 0
            else:
                failures += 1
                await asyncio.sleep(_RESTARTS.pause(failures))
            self.restarts += 1
            try:
                await self.start()
            except StartFailed:
                # The log of the process says why it failed. The next attempt follows after a longer pause.
                self._ended.set()
            wake()

    async def stop(self, grace_seconds: float) -> None:
        """End the process within the grace period."""
        if self._child is not None:
            await self._child.stop(grace_seconds)
