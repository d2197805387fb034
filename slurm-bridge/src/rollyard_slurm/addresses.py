"""Functions that find the address of the controller, and that of this host as the nodes see it."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from rollyard_slurm.errors import SlurmError
from rollyard_slurm.node import source_address

_CONTROLLER: Final = re.compile(
    r"^(?:SlurmctldHost\[0\]|ControlAddr|ControlMachine)\s*=\s*(\S+)", re.MULTILINE
)
SLURMCTLD_PORT: Final = 6817
"""The usual port of the controller. Only the route to it matters, and nothing is sent."""


def _ask(arguments: Sequence[str], timeout: float, env: Mapping[str, str]) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        SlurmError: The command does not exist, fails or does not end within `timeout` seconds.
    """
    try:
        done = subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=dict(env),
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"there is no program {arguments[0]!r} on PATH: is this a Slurm login node?"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{arguments[0]} does not answer: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{arguments[0]}: {done.stderr.strip()[:300] or f'exit status {done.returncode}'}")
    return done.stdout


def controller(config: str) -> str:
    """Return the controller's address from the output of `scontrol show config`.

    The result is empty if the output names no controller.
    """
    match = _CONTROLLER.search(config)
    if match is None:
        return ""
    name, _, address = match[1].partition("(")
    return address.rstrip(")") or name


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which only this machine can reach."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def own_address(timeout: float, env: Mapping[str, str]) -> str:
    """Return the address of this host from which it reaches the controller and the nodes.

    Raises:
        SlurmError: Slurm does not answer, or no address is found.
    """
    hosts = [controller(_ask(["scontrol", "show", "config"], timeout, env))]
    address = toward(hosts)
    if not address or is_loopback(address):
        # The controller runs on this host. Therefore the route to a node decides.
        nodes = _ask(["sinfo", "--noheader", "--format=%o"], timeout, env).split()
        address = toward(nodes[:1]) or address
    if not address:
        raise SlurmError(
            "the address by which the nodes reach this host cannot be determined; give it with "
            "--listen ADDRESS"
        )
    return address


def toward(hosts: Sequence[str]) -> str:
    """Return the address of this host on the route to the first of the hosts that is reachable.

    The result is empty if no host is reachable.
    """
    for host in hosts:
        try:
            if host:
                return source_address(host, SLURMCTLD_PORT)
        except OSError:
            continue
    return ""


def checked_address(text: str) -> str:
    """Check that this host can listen on an address, and return the address.

    Raises:
        SlurmError: The text is not an address of this host.
    """
    try:
        address = socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.bind((text, 0))
    except OSError as error:
        raise SlurmError(
            f"--listen {text}: is no address of this host ({error.strerror or error})"
        ) from error
    return text
