"""Access to the control plane of a Kubernetes cluster over kubectl, with the rights of a kubeconfig.

Installations of Rollyard are found by the labels of their Services. kubectl handles authentication plugins
and proxies, and its tunnel to a control plane needs no ingress.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rollyard_drivers.host import launcher
from rollyard_process.backoff import Backoff

from rollyard import terminal
from rollyard.errors import CliError, LookupFailed, UsageProblem

SCHEME: Final = "kubernetes://"
"""The scheme of URLs `kubernetes://NAMESPACE/RELEASE`. Either part may be left out."""
SELECTOR: Final = "app.kubernetes.io/name=rollyard,app.kubernetes.io/component=api"
INSTANCE: Final = "app.kubernetes.io/instance"
TOKENS_SECRET: Final = "rollyard.dev/tokens-secret"
TOKEN_KEY: Final = "admin"
CALL_SECONDS: Final = 15
"""The limit of one kubectl call, in seconds."""
START_SECONDS: Final = 30.0
"""The limit of the time until the tunnel is open, in seconds."""
_PAUSES: Final = Backoff(first=0.1, longest=1.0)
"""The seconds between two attempts to restore a broken tunnel."""
_FORWARDING: Final = re.compile(rb"^Forwarding from 127\.0\.0\.1:(\d+) ")


class KubectlRefused(CliError):
    """Raised if kubectl failed. The message is kubectl's own."""

    reason = "KubectlRefused"

    @property
    def forbidden(self) -> bool:
        """Whether the cluster refused the call because the user lacks rights."""
        return "Forbidden" in str(self) or "forbidden" in str(self)


def _problem(message: str) -> CliError:
    """Return the error for a cluster or rights in it that do not suffice. The message says what to do."""
    return CliError(message, reason="ClusterProblem")


def configured(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether kubectl and a kubeconfig exist. This does not contact a cluster."""
    if shutil.which("kubectl") is None:
        return False
    variable = env.get("KUBECONFIG")
    paths = [Path(part) for part in variable.split(os.pathsep) if part] if variable else []
    return any(path.is_file() for path in paths or [Path.home() / ".kube" / "config"])


def kubectl(*arguments: str, seconds: float = CALL_SECONDS) -> str:
    """Run kubectl and return its output.

    Raises:
        KubectlRefused: kubectl failed.
        CliError: There is no kubectl, or no cluster answers in time.
    """
    command = [_program(), *arguments, f"--request-timeout={seconds:.0f}s"]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 5
        )
    except subprocess.TimeoutExpired as error:
        raise _problem(f"the cluster does not answer within {seconds:.0f} s") from error
    if process.returncode == 0:
        return process.stdout
    lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else f"kubectl ended with status {process.returncode}"
    unreachable = ("was refused", "Unable to connect", "i/o timeout", "no such host", "context deadline")
    if any(part in text for part in unreachable):
        raise _problem(f"the cluster does not answer: {text} (is KUBECONFIG right?)")
    raise KubectlRefused(text)


def output_lines(*arguments: str, limit: int) -> Iterator[bytes]:
    """Run kubectl without a time limit, and yield the lines of its output, in parts of at most `limit` bytes.

    What it says beside them, such as that there are no such pods, is printed to standard error.

    Raises:
        KubectlRefused: kubectl failed.
        CliError: There is no kubectl.
    """
    program = _program()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(limit):
                yield line.rstrip(b"\r\n")
            status = process.wait(CALL_SECONDS)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        said = [line for line in errors.read(limit).decode(errors="replace").splitlines() if line.strip()]
    if status:
        text = said[-1].removeprefix("error: ") if said else f"kubectl ended with status {status}"
        raise KubectlRefused(text)
    for text in said:
        terminal.echo_line(f"rollyard: {text}", err=True)


def _program() -> str:
    program = shutil.which("kubectl")
    if program is None:
        raise _problem(
            "kubectl is not on PATH, and --kubernetes needs it; install it, or give --url (an ingress, say)"
        )
    return program


@dataclass(frozen=True, slots=True)
class Installation:
    """One installation of Rollyard in a cluster."""

    namespace: str
    service: str
    release: str
    scheme: str
    port: int
    tokens_secret: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.release}"


def current_namespace() -> str:
    """Return the namespace of the kubeconfig's context, which is `default` if it names none."""
    with contextlib.suppress(KubectlRefused):
        text = kubectl("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip()
        if text:
            return text
    return "default"


def parse(url: str) -> tuple[str, str]:
    """Return the namespace and the release of a `kubernetes://` URL. An empty part stands for any.

    Raises:
        UsageProblem: A part is not a valid name.
    """
    namespace, _, release = url.removeprefix(SCHEME).strip("/").partition("/")
    namespace = "" if namespace == "*" else namespace
    for part in (namespace, release):
        if part and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", part):
            raise UsageProblem(f"--kubernetes must be NAMESPACE or NAMESPACE/RELEASE (got {part!r})")
    return namespace, release


def find(url: str) -> Installation:
    """Return the one installation that a `kubernetes://` URL names.

    Raises:
        LookupFailed: There is no such installation.
        UsageProblem: There are several.
        CliError: The cluster does not answer, or it refuses to list Services.
    """
    namespace, release = parse(url)
    installations, where = _listed(namespace)
    installations = [
        installation for installation in installations if not release or installation.release == release
    ]
    if not installations:
        title = f"release {release!r} of Rollyard" if release else "Rollyard"
        raise LookupFailed(f"no {title} is installed in {where} (no Service labelled {SELECTOR})")
    if len(installations) > 1:
        names = ", ".join(sorted(map(str, installations)))
        raise UsageProblem(
            f"several Rollyards are installed ({names}): choose with --kubernetes=NAMESPACE/RELEASE"
        )
    return installations[0]


def _listed(namespace: str) -> tuple[list[Installation], str]:
    """Return the installations, and the name of the scope in which they were listed.

    Without a namespace, the scope is the whole cluster if the rights permit that, and otherwise the
    kubeconfig's own namespace.
    """
    if not namespace:
        try:
            return _services("--all-namespaces"), "the cluster"
        except KubectlRefused as error:
            if not error.forbidden:
                raise _problem(f"services cannot be listed: {error}") from error
        # The rights do not cover the whole cluster, so only the kubeconfig's own namespace is listed.
        namespace = current_namespace()
    try:
        return _services("--namespace", namespace), f"namespace {namespace!r}"
    except KubectlRefused as error:
        message = f"services of namespace {namespace!r} cannot be listed: {error}"
        if error.forbidden:
            message += (
                "; name the installation's namespace (--kubernetes=NAMESPACE), or ask for `list services`"
            )
        raise _problem(message) from error


def _services(*scope: str) -> list[Installation]:
    document = json.loads(kubectl("get", "services", *scope, "--selector", SELECTOR, "--output", "json"))
    installations = []
    for item in document["items"]:
        meta = item["metadata"]
        for port in item["spec"].get("ports", []):
            if port.get("name") in ("http", "https"):
                labels: dict[str, str] = meta.get("labels", {})
                annotations: dict[str, str] = meta.get("annotations", {})
                installations.append(
                    Installation(
                        namespace=meta["namespace"],
                        service=meta["name"],
                        release=labels.get(INSTANCE, meta["name"]),
                        scheme=port["name"],
                        port=port["port"],
                        tokens_secret=annotations.get(TOKENS_SECRET, ""),
                    )
                )
                break
    return installations


def token(installation: Installation) -> str:
    """Return the admin token from the installation's Secret.

    Raises:
        CliError: The Secret cannot be read, or it holds no admin token.
    """
    name, namespace = installation.tokens_secret, installation.namespace
    instead = "set ROLLYARD_TOKEN to a token that you were given"
    if not name:
        raise _problem(f"the Service of {installation} names no Secret with tokens; {instead}")
    where = f"Secret {name!r} in namespace {namespace!r}"
    try:
        text = kubectl("get", "secret", name, "--namespace", namespace, "--output", "json")
    except KubectlRefused as error:
        if error.forbidden:
            raise _problem(
                f"you may not read {where}: {instead}, or ask for the right to `get` it"
            ) from error
        raise _problem(f"{where}: {error}; {instead}") from error
    encoded = (json.loads(text).get("data") or {}).get(TOKEN_KEY, "")
    try:
        decoded = base64.b64decode(encoded, validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        decoded = ""
    if not decoded:
        raise _problem(f"Secret {name!r} in namespace {namespace!r} has no key {TOKEN_KEY!r}; {instead}")
    return decoded


class Tunnel:
    """A `kubectl port-forward` that is started again on the same port when its pod ends."""

    def __init__(self, installation: Installation, errors: IO[bytes]) -> None:
        """Make a tunnel, which is not open yet. `errors` is an empty file for kubectl's standard error."""
        self._installation = installation
        self._errors = errors
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self.port = 0

    def open(self) -> None:
        """Open the tunnel, and return when it accepts local connections.

        Raises:
            CliError: The user may not forward ports, the tunnel is not open in time, or no pod runs.
        """
        opened = threading.Event()
        process = self._start(0)
        assert process is not None
        self._run(self._read, process.stdout, opened)
        in_time = opened.wait(START_SECONDS)
        if not self.port:
            failure = self._failure(in_time)
            self.close()
            raise failure
        self._run(self._keep, process)

    def close(self) -> None:
        """End kubectl, and return when it has ended."""
        with self._lock:
            self._closing.set()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
        for thread in self._threads:
            thread.join()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(
            target=target, args=arguments, name=f"kubectl{target.__name__}", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def _start(self, port: int) -> subprocess.Popen[bytes] | None:
        """Start kubectl on a local port and return its process, or None if the tunnel is being closed.

        The port 0 selects any free one.
        """
        installation = self._installation
        program = shutil.which("kubectl") or "kubectl"
        command = [program, "port-forward", "--namespace", installation.namespace, "--address", "127.0.0.1"]
        command += [f"service/{installation.service}", f"{port or ''}:{installation.port}"]
        with self._lock:
            if self._closing.is_set():
                return None
            # Its own session keeps Ctrl-C away from kubectl. The launcher ends it with this process.
            self._process = subprocess.Popen(
                [sys.executable, "-IS", str(launcher.__file__), str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if not port else subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
            return self._process

    def _read(self, output: IO[bytes], opened: threading.Event) -> None:
        with output:
            for line in output:
                match = _FORWARDING.match(line)
                if match is not None and not self.port:
                    self.port = int(match[1])
                    opened.set()
        opened.set()

    def _keep(self, process: subprocess.Popen[bytes] | None) -> None:
        # The kernel counts this thread as the parent of new processes, so it lives as long as they do.
        failures = 0
        while process is not None:
            began = time.monotonic()
            process.wait()
            failures = 1 if time.monotonic() - began > _PAUSES.longest else failures + 1
            if self._closing.wait(_PAUSES.pause(failures)):
                return
            process = self._start(self.port)

    def _failure(self, in_time: bool) -> CliError:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        text = next((line for line in reversed(lines) if line), "kubectl said nothing").removeprefix(
            "error: "
        )
        where = f"{self._installation.service!r} in namespace {self._installation.namespace!r}"
        if not in_time:
            return CliError(
                f"no tunnel to Service {where} within {START_SECONDS:.0f} s: {text}", reason="NoServer"
            )
        if "forbidden" in text.lower():
            return _problem(
                f"you may not forward a port to Service {where}: {text}; ask for `get services`, `list pods` "
                "and `create pods/portforward` there, or give --url (an ingress, say)"
            )
        return CliError(f"no tunnel to Service {where}: {text}; does its pod run?", reason="NoServer")


@contextlib.contextmanager
def forwarded(installation: Installation) -> Iterator[str]:
    """Yield a local URL of the installation's control plane, which works as long as the block lasts.

    Raises:
        CliError: The user may not forward ports.
        CliError: The tunnel is not open in time, or no pod runs.
    """
    with tempfile.TemporaryFile() as errors:
        tunnel = Tunnel(installation, errors)
        tunnel.open()
        try:
            yield f"{installation.scheme}://127.0.0.1:{tunnel.port}"
        finally:
            tunnel.close()
