"""Hosts that sandboxes may reach, as a job names them and as the installer allows them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Annotated, Final

from pydantic import Field

MAX_HOSTS: Final = 64
USUAL_PORTS: Final = frozenset({80, 443})
"""The ports of an entry that names none."""
EVERY_HOST: Final = "*"
"""The installer's entry that contains every host. A job cannot use it."""
_LABEL: Final = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_TOP: Final = "[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
# A top-level label begins with a letter, so no entry is an IP address in any spelling.
HOST_PATTERN: Final = rf"^([*][.])?({_LABEL}[.])+{_TOP}(:[0-9]{{1,5}})?$"
_ENTRY: Final = re.compile(HOST_PATTERN.removesuffix("$"))
_NAME: Final = re.compile(rf"({_LABEL}[.])+{_TOP}")
_MAX_NAME: Final = 253

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
AllowedHost = Annotated[str, Field(pattern=HOST_PATTERN, max_length=262)]
"""A DNS name with a dot, in lower-case ASCII: `pypi.org`, `*.example.org` or `example.org:8443`."""


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of a list of hosts."""

    name: str
    """The DNS name. It is empty in the rule for every host."""
    below: bool
    """Whether the rule covers all names below `name`, at any depth, instead of the name itself."""
    ports: frozenset[int] = USUAL_PORTS
    network: IPNetwork | None = None
    """In the installer's list: where the host may be, in addition to public addresses."""

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Return the rule for an entry of `allowedHosts`.

        Raises:
            ValueError: The text is no such entry. The message says what would be right.
        """
        if _ENTRY.fullmatch(text) is None:
            raise ValueError(
                f"{text!r} is not a host: a DNS name with a dot, in lower case, is needed, as pypi.org, "
                "*.example.org or example.org:8443"
            )
        name, separator, port = text.partition(":")
        if separator and not 0 < int(port) < 65_536:
            raise ValueError(f"{text!r}: a port is a number from 1 to 65535")
        plain = name.removeprefix("*.")
        if len(plain) > _MAX_NAME:
            raise ValueError(f"{text!r}: a DNS name has at most {_MAX_NAME} characters")
        return cls(plain, plain != name, frozenset({int(port)}) if separator else USUAL_PORTS)

    def covers(self, host: str, port: int) -> bool:
        """Return whether a connection to this host (see `host_name`) and port is allowed."""
        if port not in self.ports:
            return False
        if not self.name:
            return True
        return host.endswith(f".{self.name}") if self.below else host == self.name

    def contains(self, other: HostRule) -> bool:
        """Return whether this rule covers everything that the other one covers."""
        if not other.ports <= self.ports:
            return False
        if not self.name:
            return True
        if not self.below:
            return not other.below and other.name == self.name
        return other.name.endswith(f".{self.name}") or (other.below and other.name == self.name)


def installers_rule(text: str) -> HostRule:
    """Return the rule for an entry of the installer's list.

    It may be `*`, or pin a host to an address or a network that is not public: `pypi.org=10.1.2.3` or
    `*.example.org=10.1.0.0/16`.

    Raises:
        ValueError: The text is no such entry. The message says what would be right.
    """
    if text == EVERY_HOST:
        return HostRule("", True)
    host, pinned, where = text.partition("=")
    rule = HostRule.parse(host)
    if not pinned:
        return rule
    try:
        network = ipaddress.ip_network(where)
    except ValueError as error:
        raise ValueError(f"{text!r}: an address or a network such as 10.1.0.0/16 must follow '='") from error
    if network.is_loopback or network.is_link_local or network.is_multicast or network.is_unspecified:
        raise ValueError(f"{text!r}: sandboxes never reach loopback, link-local and multicast addresses")
    return replace(rule, network=network)


def host_name(text: str) -> str | None:
    """Return the DNS name that a program asks for, in the form in which rules compare it.

    The result is None if the text is not a name that a rule could cover, such as an IP address.
    """
    name = text.lower().removesuffix(".")
    return name if len(name) <= _MAX_NAME and _NAME.fullmatch(name) else None
