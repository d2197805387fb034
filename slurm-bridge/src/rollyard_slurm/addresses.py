"""Functions that find the address of the controller, and that of this host as the nodes see it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import Final

from rollyard_slurm.errors import SlurmError
from rollyard_slurm.node import source_address

_CONTROLLER: Final = re.compile(
    r"^(?:SlurmctldHost\[0\]|ControlAddr|ControlMachine)\s*=\s*(\S+)", re.MULTILINE
)
SLURMCTLD_PORT: Final = 6817
"""The usual port of the controller. Only the route to it matters, and nothing is sent."""


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


def required(address: str) -> str:
    """Return the address of this host.

    Raises:
        SlurmError: It is empty, because none was found.
    """
    if not address:
        raise SlurmError(
            "the address by which the nodes reach this host cannot be determined; give it with "
            "--listen ADDRESS"
        )
    return address


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
            f"--listen {text}: is not an address of this host ({error.strerror or error})"
        ) from error
    return text
