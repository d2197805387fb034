"""A limit on wrong one-time codes from one address."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from typing import Final

from rollyard_api.core.problems import ApiError

GUESSES: Final = 10
"""The number of wrong codes that one address may send within `WINDOW_SECONDS`."""
WINDOW_SECONDS: Final = 60.0
REMEMBERED: Final = 4096
"""The largest number of addresses that are remembered."""
IPV6_NETWORK: Final = 64
"""The bits of an IPv6 address that belong to one user, who chooses the others at will."""


class TooManyGuesses(ApiError):
    """Too many wrong codes came from one address; retry after Retry-After seconds."""

    status = 429
    reason = "TooManyGuesses"


class Guesses:
    """The wrong codes of the last minute, by address.

    A code has 256 random bits, so that no number of guesses finds one. The limit keeps guesses from costing
    the database anything. Each replica counts by itself.
    """

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def check(self, address: str) -> None:
        """Refuse an address that has sent too many wrong codes.

        Raises:
            TooManyGuesses: The address must wait.
        """
        since, count = self._wrong.get(_user(address), (0.0, 0))
        left = since + WINDOW_SECONDS - time.monotonic()
        if count >= GUESSES and left > 0:
            raise TooManyGuesses(
                f"{count} wrong codes came from this address; wait {left:.0f} s",
                headers={"Retry-After": str(int(left) + 1)},
            )

    def count(self, address: str) -> None:
        """Count a wrong code."""
        user, now = _user(address), time.monotonic()
        since, count = self._wrong.pop(user, (now, 0))
        if now - since > WINDOW_SECONDS:
            since, count = now, 0
        self._wrong[user] = (since, count + 1)
        while len(self._wrong) > REMEMBERED:
            self._wrong.popitem(last=False)


def _user(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, IPV6_NETWORK), strict=False))
