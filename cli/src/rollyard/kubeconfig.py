"""The control plane of a cluster, reached with the rights of a kubeconfig: found by labels, over kubectl.

kubectl does what it is good at: authentication plugins, proxies, and a tunnel that needs no
ingress. The tunnel lasts as long as the command.
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
from typing import IO

from rollyard_operator.host import launcher

from rollyard.errors import CliError, NoServer, NotFound, UsageProblem

SCHEME = "kubernetes://"
"""`kubernetes://NAMESPACE/RELEASE` as a URL; either part may be left out."""
SELECTOR = "app.kubernetes.io/name=rollyard,app.kubernetes.io/component=api"
INSTANCE = "app.kubernetes.io/instance"
TOKENS_SECRET = "rollyard.dev/tokens-secret"
TOKEN_KEY = "admin"
CALL_SECONDS = 15
"""Of one kubectl call."""
START_SECONDS = 30.0
"""Until the tunnel stands."""
LONGEST_PAUSE = 1.0
"""Seconds between two attempts to bring a broken tunnel back."""
_FORWARDING = re.compile(rb"^Forwarding from 127\.0\.0\.1:(\d+) ")


class ClusterProblem(CliError):
    """The cluster, or the rights in it, do not do; the message says what to do."""

    reason = "ClusterProblem"


class _Refused(Exception):
    """kubectl failed; its own words."""

    @property
    def forbidden(self) -> bool:
        return "Forbidden" in str(self) or "forbidden" in str(self)


@dataclass(frozen=True, slots=True)
class Installation:
    """One Rollyard in a cluster."""

    namespace: str
    service: str
    release: str
    scheme: str
    port: int
    tokens_secret: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.release}"


def configured(env: Mapping[str, str] = os.environ) -> bool:
    """Whether there are kubectl and a kubeconfig, told without asking any cluster."""
    if shutil.which("kubectl") is None:
        return False
    given = env.get("KUBECONFIG")
    paths = [Path(part) for part in given.split(os.pathsep) if part] if given else []
    return any(path.is_file() for path in paths or [Path.home() / ".kube" / "config"])


def _kubectl(*arguments: str, seconds: float = CALL_SECONDS) -> str:
    """What kubectl prints.

    Raises:
        _Refused: it failed.
        ClusterProblem: there is no kubectl, or no cluster that answers in time.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ClusterProblem(
            "kubectl is not on PATH, and --kubernetes needs it; install it, or give --url (an ingress, say)"
        )
    command = [program, *arguments, f"--request-timeout={seconds:.0f}s"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds + 5
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterProblem(f"the cluster does not answer within {seconds:.0f} s") from error
    if done.returncode == 0:
        return done.stdout
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    text = lines[-1].removeprefix("error: ") if lines else f"kubectl ended with status {done.returncode}"
    unreachable = ("was refused", "Unable to connect", "i/o timeout", "no such host", "context deadline")
    if any(part in text for part in unreachable):
        raise ClusterProblem(f"the cluster does not answer: {text} (is KUBECONFIG right?)")
    raise _Refused(text)


def _current_namespace() -> str:
    with contextlib.suppress(_Refused):
        text = _kubectl("config", "view", "--minify", "-o", "jsonpath={..namespace}").strip()
        if text:
            return text
    return "default"


def parse(url: str) -> tuple[str, str]:
    """Namespace and release of a `kubernetes://` URL; empty: any.

    Raises:
        UsageProblem: it is none.
    """
    namespace, _, release = url.removeprefix(SCHEME).strip("/").partition("/")
    namespace = "" if namespace == "*" else namespace
    for part in (namespace, release):
        if part and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", part):
            raise UsageProblem(f"--kubernetes must be NAMESPACE or NAMESPACE/RELEASE (got {part!r})")
    return namespace, release


def find(url: str) -> Installation:
    """The one installation that a `kubernetes://` URL means.

    Raises:
        NotFound: there is none. UsageProblem: there are several. ClusterProblem.
    """
    namespace, release = parse(url)
    found, where = _listed(namespace)
    found = [one for one in found if not release or one.release == release]
    if not found:
        wanted = f"release {release!r} of Rollyard" if release else "Rollyard"
        raise NotFound(f"no {wanted} is installed in {where} (no Service labelled {SELECTOR})")
    if len(found) > 1:
        names = ", ".join(sorted(map(str, found)))
        raise UsageProblem(
            f"several Rollyards are installed ({names}): choose with --kubernetes=NAMESPACE/RELEASE"
        )
    return found[0]


def _listed(namespace: str) -> tuple[list[Installation], str]:
    """The installations of a namespace, or of as much as may be looked at; and where that was."""
    if not namespace:
        try:
            return _services("--all-namespaces"), "the cluster"
        except _Refused as error:
            if not error.forbidden:
                raise ClusterProblem(f"services cannot be listed: {error}") from error
        # Not all of the cluster, then: the kubeconfig's own namespace.
        namespace = _current_namespace()
    try:
        return _services("--namespace", namespace), f"namespace {namespace!r}"
    except _Refused as error:
        what = f"services of namespace {namespace!r} cannot be listed: {error}"
        if error.forbidden:
            what += "; name the installation's namespace (--kubernetes=NAMESPACE), or ask for `list services`"
        raise ClusterProblem(what) from error


def _services(*scope: str) -> list[Installation]:
    document = json.loads(_kubectl("get", "services", *scope, "--selector", SELECTOR, "--output", "json"))
    found = []
    for item in document["items"]:
        meta = item["metadata"]
        for port in item["spec"].get("ports", []):
            if port.get("name") in ("http", "https"):
                labels: dict[str, str] = meta.get("labels", {})
                annotations: dict[str, str] = meta.get("annotations", {})
                found.append(
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
    return found


def token(installation: Installation) -> str:
    """The admin's token, from the installation's Secret.

    Raises:
        ClusterProblem: it may not be read, or holds none.
    """
    name, namespace = installation.tokens_secret, installation.namespace
    instead = "set ROLLYARD_TOKEN to a token that you were given"
    if not name:
        raise ClusterProblem(f"the Service of {installation} names no Secret with tokens; {instead}")
    where = f"Secret {name!r} in namespace {namespace!r}"
    try:
        text = _kubectl("get", "secret", name, "--namespace", namespace, "--output", "json")
    except _Refused as error:
        if error.forbidden:
            raise ClusterProblem(
                f"you may not read {where}: {instead}, or ask for the right to `get` it"
            ) from error
        raise ClusterProblem(f"{where}: {error}; {instead}") from error
    encoded = (json.loads(text).get("data") or {}).get(TOKEN_KEY, "")
    try:
        decoded = base64.b64decode(encoded, validate=True).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        decoded = ""
    if not decoded:
        raise ClusterProblem(
            f"Secret {name!r} in namespace {namespace!r} has no key {TOKEN_KEY!r}; {instead}"
        )
    return decoded


class Tunnel:
    """`kubectl port-forward`, brought back on the same port when its pod goes."""

    def __init__(self, installation: Installation, errors: IO[bytes]) -> None:
        """`errors`: an empty file, for kubectl's words."""
        self._installation = installation
        self._errors = errors
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self.port = 0

    def open(self) -> None:
        """Returns when local connections are taken.

        Raises:
            ClusterProblem: no right to.
            NoServer: it does not stand in time, or no pod runs.
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
        """Ends kubectl; returns when it has gone."""
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
        """kubectl on a local port, 0: any free one; None while closing."""
        one = self._installation
        program = shutil.which("kubectl") or "kubectl"
        command = [program, "port-forward", "--namespace", one.namespace, "--address", "127.0.0.1"]
        command += [f"service/{one.service}", f"{port or ''}:{one.port}"]
        with self._lock:
            if self._closing.is_set():
                return None
            # In a session of its own, so that Ctrl-C is for the command alone; it dies with us all the same.
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
        # Of a new process the kernel counts this thread as the parent: it lives as long as they do.
        pause = 0.1
        while process is not None:
            began = time.monotonic()
            process.wait()
            pause = 0.1 if time.monotonic() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
            if self._closing.wait(pause):
                return
            process = self._start(self.port)

    def _failure(self, in_time: bool) -> CliError:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines()]
        said = next((line for line in reversed(lines) if line), "kubectl said nothing").removeprefix(
            "error: "
        )
        where = f"{self._installation.service!r} in namespace {self._installation.namespace!r}"
        if not in_time:
            return NoServer(f"no tunnel to Service {where} within {START_SECONDS:.0f} s: {said}")
        if "forbidden" in said.lower():
            return ClusterProblem(
                f"you may not forward a port to Service {where}: {said}; ask for `get services`, `list pods` "
                "and `create pods/portforward` there, or give --url (an ingress, say)"
            )
        return NoServer(f"no tunnel to Service {where}: {said}; does its pod run?")


@contextlib.contextmanager
def forwarded(installation: Installation) -> Iterator[str]:
    """A local URL of the installation's control plane, as long as the block lasts.

    Raises:
        ClusterProblem, NoServer.
    """
    with tempfile.TemporaryFile() as errors:
        tunnel = Tunnel(installation, errors)
        tunnel.open()
        try:
            yield f"{installation.scheme}://127.0.0.1:{tunnel.port}"
        finally:
            tunnel.close()
