"""The leases that this process holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rollyard_crds.lease import Lease, LeaseRef, LiveTurn, SandboxHandle

if TYPE_CHECKING:
    from rollyard_process.telemetry.scope import RolloutScope

Stop = Literal["cancelled", "lost", "drained"]


@dataclass(slots=True, eq=False)
class HeldLease:
    """One lease and the task that works on it."""

    lease: Lease
    started: float = field(default_factory=time.monotonic)
    """The time at which work began. Stage timeouts count from here."""
    task: asyncio.Task[None] | None = None
    stop: Stop | None = None
    """The reason why its task was stopped from outside."""
    scope: RolloutScope | None = None
    """The rollout, for log lines and spans."""
    begun: bool = False
    """Whether its task has begun to run. A task that is cancelled earlier would never clean up."""
    reporting: bool = False
    """Whether the outcome is on its way to the control plane."""
    sandbox: SandboxHandle | None = None
    """The rollout's sandbox, even while Init has not reported it yet."""
    eval_sandbox: SandboxHandle | None = None
    """Eval's own fresh sandbox, while there is one."""
    live: Callable[[int], list[LiveTurn]] | None = None
    """Returns the conversation's messages from a given number on, shortened for viewers; None before Run."""
    done_with_sandbox: bool = False
    """Whether to remove the sandbox once the control plane has answered for the outcome.

    It must not be removed earlier: if this worker were killed in between, the worker that leases the stage
    next would find a lost sandbox and count a failure.
    """

    @property
    def ref(self) -> LeaseRef:
        """Return what identifies this lease in requests: the rollout and its fencing token."""
        return LeaseRef(rollout=self.lease.rollout, token=self.lease.token)

    def end(self, why: Stop) -> None:
        """Stop the work at once. This has no effect if the outcome is already being reported."""
        if self.reporting or self.stop is not None:
            return
        self.stop = why
        if self.task is not None and self.begun:
            self.task.cancel()


class LeaseTable:
    """All leases held, by rollout and token."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], HeldLease] = {}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._held.values()))

    def add(self, holding: HeldLease) -> None:
        """Add a lease that has just been granted."""
        self._held[holding.lease.rollout, holding.lease.token] = holding

    async def remove(self, holding: HeldLease) -> None:
        """Remove a lease. A missing lease is not an error."""
        self._held.pop((holding.lease.rollout, holding.lease.token), None)
        async with self._changed:
            self._changed.notify_all()

    def find(self, refs: Iterable[LeaseRef]) -> list[HeldLease]:
        """Return the leases of `refs` that are held here."""
        leases = (self._held.get((ref.rollout, ref.token)) for ref in refs)
        return [holding for holding in leases if holding is not None]

    def any_working(self) -> bool:
        """Return whether a lease is held whose outcome is not there yet."""
        return any(not holding.reporting for holding in self._held.values())

    def unreported_sandboxes(self) -> set[str]:
        """Return the ids of the sandboxes that the control plane does not know.

        These are Init's sandboxes that are not reported yet, and Eval's own, which are never reported.
        """
        handles = [holding.sandbox for holding in self if holding.lease.stage == "init"]
        handles += [holding.eval_sandbox for holding in self]
        return {handle.id for handle in handles if handle is not None}

    async def empty(self) -> None:
        """Wait until no lease is held."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._held)
