"""Find out whether the addresses outside the cluster, which sandboxes must not reach, answer at all.

An address that never answers proves nothing. The operator's own pod is not restricted, so the operator tries
the addresses itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

AGAIN_SECONDS = 300.0
"""The time between two tries, in seconds."""
TRY_SECONDS = 3.0
NOT_PROVEN = (
    "no sandbox tries an address outside of the cluster before it is handed out (value "
    "sandboxes.isolation.external): that they reach none rests on the NetworkPolicies alone"
)
SILENT = (
    "none of the addresses outside of the cluster answers the operator ({}), so that it proves nothing that "
    "sandboxes do not reach them (value sandboxes.isolation.external)"
)
_log = logging.getLogger(__name__)


class Witnesses:
    """Tries the addresses every AGAIN_SECONDS.

    Args:
        targets: The addresses as `ADDRESS:PORT`, with names resolved.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(targets)
        self._answering: frozenset[str] | None = None

    async def run(self) -> None:
        """Try the addresses until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(AGAIN_SECONDS)

    async def look(self) -> None:
        """Try all addresses once, at the same time."""
        answers = await asyncio.gather(*(_answers(target) for target in self._targets))
        now = frozenset(target for target, fine in zip(self._targets, answers, strict=True) if fine)
        if now != self._answering:
            self._answering = now
            if doubt := self.doubt():
                _log.warning("%s", doubt)

    def doubt(self) -> str:
        """Return what is not proven about the isolation of sandboxes.

        An empty string means that everything is proven, or that it is not known yet.
        """
        if not self._targets:
            return NOT_PROVEN
        if self._answering is None or self._answering:
            return ""
        return SILENT.format(", ".join(self._targets))


async def _answers(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(TRY_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
