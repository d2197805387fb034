"""Addresses: which servers may be added, and how their names and networks are written. It is pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from rollyard_api.core.hosts import NAME, address_of
from rollyard_api.core.problems import Invalid

_LOOPBACK: Final = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
MAX_ADDRESS: Final = 2048


def _rule(text: str) -> str:
    try:
        ipaddress.ip_network(text)
    except ValueError as error:
        if "/" in text or not NAME.fullmatch(text) or text[-1].isdigit():
            raise ValueError(
                "must be a network such as 10.0.0.0/8, an address, or a name of a host"
            ) from error
    return text


def _host(text: str) -> str:
    if not NAME.fullmatch(text):
        raise ValueError("must be the name of a host, without a port")
    return text.lower()


ServerRule = Annotated[str, Field(max_length=253), AfterValidator(_rule)]
HostPattern = Annotated[str, Field(max_length=253), AfterValidator(_host)]


def server_url(address: str, rules: Sequence[str]) -> str:
    """Return the base URL of a server that a client adds; `HOST:PORT` stands for `http://HOST:PORT`.

    Args:
        address: What the client gives.
        rules: The networks and names that are allowed beside loopback.

    Raises:
        Invalid: This is no address of a server, or one that the installer does not allow.
    """
    given = address.strip()
    if len(given) > MAX_ADDRESS:
        raise _refused(f"must have at most {MAX_ADDRESS} characters")
    if "://" not in given:
        given = f"http://{given}"
    try:
        parts = urlsplit(given)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _refused("must be a URL such as http://10.0.0.7:8000") from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password is not None)
    if parts.scheme not in ("http", "https") or not host or not plain or re.search(r"[\s\\\x00-\x20]", given):
        raise _refused("must be a URL such as http://10.0.0.7:8000, without a user, a query or a fragment")
    if not _allowed(host, rules):
        raise _refused(
            f"the host {host!r} is neither a loopback address nor allowed by this server's setting 'servers'"
        )
    shown = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")
    return base + parts.path.rstrip("/").removesuffix("/v1")


def _refused(problem: str) -> Invalid:
    return Invalid(f"address: {problem}", errors=[f"address: {problem}"])


def _allowed(host: str, rules: Sequence[str]) -> bool:
    address = address_of(host)
    if address is None:
        return host.lower() == "localhost" or host.lower() in {rule.lower() for rule in rules}
    networks = [*_LOOPBACK]
    for rule in rules:
        try:
            networks.append(ipaddress.ip_network(rule))
        except ValueError:
            continue  # The rule is a name.
    return any(address in network for network in networks if network.version == address.version)
