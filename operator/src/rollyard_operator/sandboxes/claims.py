"""The claims that the control plane lists, which the operator reads, follows and reports on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Set
from datetime import datetime
from typing import Final, Protocol

from rollyard_client import NotFound, RollyardError
from rollyard_crds.claims import Claim, ClaimList, ClaimStatus, WarmWant
from rollyard_process.backoff import Backoff

POLL_SECONDS = 30.0
"""The longest time that one long poll waits for a change of claims, in seconds."""
_PAUSES: Final = Backoff(first=0.5, longest=10.0)
_log = logging.getLogger(__name__)


class ClaimSource(Protocol):
    """The calls of the control plane that the loop needs. DriverClient has them. All raise RollyardError."""

    async def claims(
        self, revision: int | None = None, wait: float = 0.0, namespace: str | None = None
    ) -> ClaimList:
        """Wait up to `wait` seconds for a change after `revision`, and return the claims."""

    async def put_claim_status(self, claim: str, status: ClaimStatus) -> Claim | None:
        """Report the state of a claim, and return it, or None if it does not exist any more."""


class Claims:
    """The claims and the warm wants as the control plane listed them last.

    Args:
        serves: Returns whether this operator looks after a namespace.
        changed: Called when the claims have changed.
    """

    def __init__(
        self,
        control: ClaimSource,
        serves: Callable[[str], bool],
        now: Callable[[], datetime],
        changed: Callable[[], object],
    ) -> None:
        self._control = control
        self._serves = serves
        self._now = now
        self._changed = changed
        self._claims: dict[str, Claim] = {}
        self._revision: int | None = None
        self._listed_at = now()
        self.warm: list[WarmWant] = []

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    @property
    def listed(self) -> bool:
        """Whether the control plane has listed its claims at least once."""
        return self._revision is not None

    @property
    def ids(self) -> Set[str]:
        """The ids of all claims."""
        return self._claims.keys()

    def get(self, claim: str) -> Claim | None:
        """Return the claim with this id, or None if there is none."""
        return self._claims.get(claim)

    def age(self, claim: Claim, now: datetime) -> float:
        """Return how long the claim has existed, in seconds."""
        return claim.age_seconds + (now - self._listed_at).total_seconds()

    async def listen(self) -> None:
        """Follow the claims until cancelled."""
        failures = 0
        while True:
            try:
                self.learn(await self._control.claims(self._revision, POLL_SECONDS))
                failures = 0
            except RollyardError as error:
                _log.warning("claims cannot be read: %s", error)
                failures += 1
                await asyncio.sleep(_PAUSES.pause(failures))

    async def look(self) -> None:
        """Read the claims now, or raise RollyardError."""
        self.learn(await self._control.claims())

    def learn(self, listed: ClaimList) -> None:
        """Store the claims and the warm wants that the control plane listed."""
        self._claims = {claim.id: claim for claim in listed.claims if self._serves(claim.namespace)}
        self.warm = [want for want in listed.warm if self._serves(want.namespace)]
        self._revision, self._listed_at = listed.revision, self._now()
        self._changed()

    async def report(self, claim: str, status: ClaimStatus) -> None:
        """Report the state of a claim, and store the answer, or raise RollyardError."""
        try:
            now = await self._control.put_claim_status(claim, status)
        except NotFound:
            now = None
        if now is None:
            self._claims.pop(claim, None)
        elif claim in self._claims:
            # A list that is on its way may be older than this answer. In that case the same step is planned
            # again.
            self._claims[claim] = now
        self._changed()
