"""Podman or Docker: identified by what it says of itself, and called without the worker's environment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollyard_pipeline.sandboxes.errors import NodeUnusable
from rollyard_pipeline.sandboxes.host.programs import run_program
from rollyard_pipeline.sandboxes.starters.launch import log_file, log_text

Kind = Literal["docker", "podman"]
KINDS: Final[tuple[Kind, ...]] = ("docker", "podman")
INFO_SECONDS: Final = 20.0
_WANTED: Final = ("memory", "pids", "cpu")
_OLDEST: Final = {"docker": (20, 10), "podman": (4, 0)}
_INSTALL: Final = {
    "docker": "install Docker Engine (https://docs.docker.com/engine/install/; Debian: `apt-get install "
    "docker.io`)",
    "podman": "install it (Debian, Ubuntu: `apt-get install podman`; Fedora, RHEL: `dnf install podman`)",
}
# The engine's client gets these variables of the worker, which say where its engine and its settings are.
_KEPT: Final = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "DBUS_SESSION_BUS_ADDRESS",
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "REGISTRY_AUTH_FILE",
)
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_DENIED: Final = re.compile(r"permission denied", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine of this machine that can start sandboxes."""

    kind: Kind
    path: str
    version: str
    own_users: bool
    """Whether the root user of its containers is not this machine's root."""
    rootless: bool
    limits: frozenset[str]
    """Which of memory, pids and cpu it can limit."""

    async def run(self, *arguments: str, seconds: float, proxies: bool = False) -> tuple[int, str]:
        """Run a command of the engine, and return its exit status and its output; see `run_program`.

        Args:
            seconds: The time after which it is ended.
            proxies: Whether it gets the worker's variables of proxies, as a pull needs them. With any other
                command an engine would hand them on to programs inside.
        """
        env = client_env(proxies=proxies)
        return await run_program([self.path, *arguments], seconds=seconds, env=env)

    async def detach(self, *arguments: str, seconds: float) -> tuple[int, str]:
        """Run a command that leaves a process behind, and return its exit status and its output.

        That process may hold the command's output open, so this waits for the command only.
        """
        with contextlib.ExitStack() as stack:
            output = log_file(stack)
            process = await asyncio.create_subprocess_exec(
                self.path,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=client_env(),
                cwd="/",
            )
            try:
                async with asyncio.timeout(seconds):
                    return await process.wait(), log_text(output)
            except TimeoutError:
                return 124, f"{log_text(output)} no end within {seconds:g} s"
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def call_engine(kind: Kind, *arguments: str, seconds: float) -> tuple[int, str]:
    """Run a command of an engine that need not work, and return its exit status and output. This blocks.

    A client that does not end in time is killed, with exit status 124. That of a missing program is 127.
    """
    try:
        done = subprocess.run(
            [shutil.which(kind) or kind, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=client_env(),
            cwd="/",
            timeout=max(0.1, seconds),
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end within {seconds:.1f} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def client_env(*, proxies: bool = False) -> dict[str, str]:
    """Return the environment of an engine's client."""
    names = (*_KEPT, *_PROXIES) if proxies else _KEPT
    env = {name: os.environ[name] for name in names if os.environ.get(name)}
    env.setdefault("PATH", os.defpath)
    return {**env, "LANG": "C.UTF-8"}


async def find_engine(kind: Kind) -> Engine:
    """Return the engine of this kind, after it has answered.

    Raises:
        NodeUnusable: There is no such program, or it can start no containers for this user. The message says
            what to do.
    """
    path = shutil.which(kind)
    if path is None:
        raise NodeUnusable(f"there is no {kind} on this machine's PATH: {_INSTALL[kind]}", "EngineMissing")
    code, text = await run_program(
        [path, "info", "--format", "{{json .}}"], seconds=INFO_SECONDS, env=client_env()
    )
    info = _document(text)
    problems = info.get("ServerErrors") or []
    if not problems and (code != 0 or not info):
        problems = [line for line in text.splitlines() if not line.startswith("{")]
    if problems or code != 0:
        raise NodeUnusable(_unusable(kind, " ".join(map(str, problems))), "EngineUnusable")
    engine = podman_engine(path, info) if kind == "podman" else docker_engine(path, info)
    check_engine(engine)
    return engine


def podman_engine(path: str, info: dict[str, Any]) -> Engine:
    """Return what `podman info` says.

    Raises:
        NodeUnusable: The engine is on another machine.
    """
    host = info.get("host", {})
    if host.get("serviceIsRemote"):
        raise NodeUnusable(_elsewhere("podman"), "EngineUnusable")
    rootless = bool(host.get("security", {}).get("rootless"))
    limits = frozenset(_WANTED) & frozenset(host.get("cgroupControllers") or ())
    if rootless and host.get("cgroupVersion") == "v1":
        limits = frozenset()  # It may list them, but a user cannot make groups there.
    version = str(info.get("version", {}).get("Version", ""))
    # Without a user namespace of its own, a root user's Podman gets one from its options.
    return Engine("podman", path, version, own_users=True, rootless=rootless, limits=limits)


def docker_engine(path: str, info: dict[str, Any]) -> Engine:
    """Return what `docker info` says.

    Raises:
        NodeUnusable: The engine is on another machine, or is Podman under another name.
    """
    if "host" in info:
        raise NodeUnusable(f"{path} is Podman: use --sandbox podman", "EngineUnusable")
    if "Desktop" in str(info.get("OperatingSystem", "")) or info.get("OSType", "linux") != "linux":
        raise NodeUnusable(_elsewhere("docker"), "EngineUnusable")
    security = {option.removeprefix("name=").split(",")[0] for option in info.get("SecurityOptions") or ()}
    limited = {
        "memory": info.get("MemoryLimit"),
        "pids": info.get("PidsLimit"),
        "cpu": info.get("CpuCfsQuota", info.get("CPUCfsQuota")),
    }
    return Engine(
        "docker",
        path,
        str(info.get("ServerVersion", "")),
        own_users=bool({"userns", "rootless"} & security),
        rootless="rootless" in security,
        limits=frozenset(name for name, works in limited.items() if works),
    )


def check_engine(engine: Engine) -> None:
    """Check that an engine is new enough and enforces every limit.

    Raises:
        NodeUnusable: It is not, or does not. The message says what to do.
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", engine.version)[:2])
    if numbers < _OLDEST[engine.kind]:
        oldest = ".".join(map(str, _OLDEST[engine.kind]))
        raise NodeUnusable(
            f"{engine.path} is {engine.kind} {engine.version}, which is too old: at least {oldest} is needed",
            "EngineUnusable",
        )
    missing = [name for name in _WANTED if name not in engine.limits]
    if missing:
        advice = (
            "boot with control groups of version 2 (kernel option systemd.unified_cgroup_hierarchy=1) and "
            "delegate them to users (systemd: Delegate=cpu memory pids for user@.service), or run the worker "
            f"and {engine.kind} as root"
            if engine.rootless
            else "mount the missing controllers, or boot with control groups of version 2"
        )
        raise NodeUnusable(
            f"{engine.kind} cannot limit {', '.join(missing)} of a container here: {advice}; or use "
            "--sandbox bubblewrap",
            "EngineUnusable",
        )


def _document(text: str) -> dict[str, Any]:
    """Return the JSON object in an output that may have warnings beside it, or {}."""
    for begin in re.finditer(r"^\{", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            document, _ = json.JSONDecoder().raw_decode(text, begin.start())
            if isinstance(document, dict):
                return document
    return {}


def _elsewhere(kind: str) -> str:
    return (
        f"{kind} starts containers in another machine or a virtual one (Docker Desktop, podman machine), "
        f"where they cannot see this worker's folders: run the worker there, or use an engine of this machine"
    )


def _unusable(kind: Kind, answer: str) -> str:
    if _DENIED.search(answer):
        advice = (
            "this user may not use it: run the worker as root, or add the user to the group docker (`usermod "
            "--append --groups docker USER`, which makes it as powerful as root) and log in again"
            if kind == "docker"
            else "this user may not use it: rootless Podman needs lines in /etc/subuid and /etc/subgid, and "
            "newuidmap"
        )
    elif kind == "docker":
        advice = "start its daemon (`systemctl start docker`), and see `docker info`"
    else:
        advice = "see `podman info`"
    return f"{kind} does not work here ({' '.join(answer.split())[-300:]}). What to do: {advice}"


def arguments_of(options: Sequence[tuple[str, str]]) -> list[str]:
    """Return options and their values as arguments."""
    return [part for option in options for part in option]
