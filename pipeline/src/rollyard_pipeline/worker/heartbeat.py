"""The heartbeat, which keeps leases and sandboxes alive and receives requests to stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rollyard_crds.lease import HeartbeatRequest, LiveTurn, LiveTurns

from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease, LeaseTable
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_pipeline.sandboxes.errors import SandboxProviderError
from rollyard_pipeline.sandboxes.interface import SandboxProvider

log = logging.getLogger(__name__)

INTERVAL: Final = 2.0  # The time between beats in seconds, and the longest delay of a cancellation.
WATCHED_INTERVAL: Final = 1.0  # The time between beats in seconds while somebody watches a rollout.
_RENEW_EVERY: Final = 20.0  # seconds
_SANDBOX_SECONDS: Final = 60.0
"""The time in seconds after which a sandbox that is not renewed ends by itself."""
_SCAN_EVERY: Final = 4.0  # The time between two readings of the run folder, in seconds.
_DROP_AT_ONCE: Final = 8  # The number of orphans to remove at once. Each one makes a few threads wait.
_LAST_SECONDS: Final = 10.0
MAX_BYTES: Final = 1 << 20
"""The bytes of all messages in one heartbeat, by their characters."""
MAX_ROLLOUT_BYTES: Final = 64 << 10
"""The bytes of the messages of one rollout in one heartbeat."""
MAX_ROLLOUTS: Final = 64
_TURN_BYTES: Final = 256
"""The approximate size of a message without its texts."""


class Heartbeat:
    """The one heartbeat loop for all leases of the process and all sandboxes of the node.

    The control plane knows which sandboxes belong neither to an unfinished rollout nor to an Init that is
    still in progress. Those sandboxes are removed, whichever worker started them.
    """

    def __init__(
        self,
        control: WorkerCalls,
        table: LeaseTable,
        provider: SandboxProvider | None,
        *,
        worker: str,
        node: str,
        sandboxes_end: bool = False,
    ) -> None:
        self._control = control
        self._table = table
        self._provider = provider
        self._worker = worker
        self._node = node
        self._sandboxes_end = sandboxes_end
        self._live = LiveTurnsToSend()
        self._claimed: list[str] = []
        self._orphans: set[str] = set()
        self._beaten = asyncio.Event()
        self._scanned = 0.0
        self._renewed = 0.0

    async def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Send heartbeats until cancelled."""
        async with asyncio.TaskGroup() as group:
            # This runs separately from the beats: a node full of orphans must not cost a lease.
            group.create_task(self._tend(clock), name="sandboxes")
            while True:
                began = clock()
                await self.beat(began)
                shortest = min((holding.lease.lease_seconds for holding in self._table), default=INTERVAL * 3)
                usual = WATCHED_INTERVAL if self._live.watched else INTERVAL
                await asyncio.sleep(max(0.05, min(usual, shortest / 3) - (clock() - began)))

    async def beat(self, now: float, ending: Sequence[str] = ()) -> None:
        """Send one heartbeat. `run` and `last` remove the orphaned sandboxes that its response names.

        Args:
            ending: The ids of the sandboxes that end with this process.
        """
        sandboxes = await self._scan(now)
        leases = list(self._table)
        unreported = self._table.unreported_sandboxes()
        live = self._live.take(leases)
        try:
            answer = await self._control.heartbeat(
                HeartbeatRequest(
                    worker=self._worker,
                    node=self._node,
                    leases=[item.ref for item in leases],
                    sandboxes=[name for name in sandboxes if name not in unreported],
                    ending=list(ending),
                    live=live,
                )
            )
        except (ControlPlaneUnavailable, ControlPlaneRefused) as error:
            log.warning("heartbeat: %s", error)
        else:
            for item in self._table.find(answer.cancelled):
                item.end("cancelled")
            for item in self._table.find(answer.lost):
                item.end("lost")
            self._live.answered(live, answer.watched)
            self._orphans = set(answer.orphans) - self._table.unreported_sandboxes()
        self._beaten.set()

    async def last(self, now: float | None = None) -> None:
        """Send a final heartbeat when no lease is held, and remove orphaned sandboxes.

        Sandboxes that a killed worker left may have no other worker that removes them.
        """
        try:
            async with asyncio.timeout(_LAST_SECONDS):
                self._scanned = 0.0
                provider = self._provider if self._sandboxes_end else None
                ending = await asyncio.to_thread(provider.own) if provider is not None else []
                await self.beat(time.monotonic() if now is None else now, ending)
                await self._drop()
        except TimeoutError:
            log.warning("orphaned sandboxes are left to their own lease: no time to remove them")

    async def _scan(self, now: float) -> list[str]:
        if self._provider is not None and now - self._scanned >= _SCAN_EVERY:
            self._scanned = now
            self._claimed = await asyncio.to_thread(self._provider.claimed)
        return self._claimed

    async def _tend(self, clock: Callable[[], float]) -> None:
        """Renew and remove sandboxes after each beat, even while the control plane is unavailable."""
        while True:
            await self._beaten.wait()
            self._beaten.clear()
            await self._renew(clock())
            await self._drop()

    async def _drop(self) -> None:
        at_once = asyncio.Semaphore(_DROP_AT_ONCE)

        async def release(provider: SandboxProvider, name: str) -> None:
            async with at_once:
                try:
                    await provider.release(name)
                except SandboxProviderError as error:
                    log.warning("orphaned sandbox %s: %s", name, error)
                else:
                    # A rollout that ends leaves its sandbox in this way, so this is no sign of a problem.
                    log.debug("removed the orphaned sandbox %s", name)

        if self._provider is not None:
            orphans = set(self._orphans)
            async with asyncio.TaskGroup() as group:
                for name in sorted(orphans):
                    group.create_task(release(self._provider, name))
            self._claimed = [name for name in self._claimed if name not in orphans]

    async def _renew(self, now: float) -> None:
        if self._provider is None or now - self._renewed < _RENEW_EVERY:
            return
        self._renewed = now
        ids = (set(self._claimed) - self._orphans) | self._table.unreported_sandboxes()
        if ids:
            await self._provider.renew(sorted(ids), _SANDBOX_SECONDS)


class LiveTurnsToSend:
    """The messages of watched rollouts that no heartbeat has sent yet."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, int]] = {}
        """The fencing token and the number of the next message to send, by watched rollout."""

    @property
    def watched(self) -> bool:
        """Whether somebody watches a rollout of this worker."""
        return bool(self._sent)

    def take(self, leases: Iterable[HeldLease]) -> list[LiveTurns]:
        """Return what is new of the watched rollouts among these leases, as much as fits into a heartbeat."""
        live: list[LiveTurns] = []
        room = MAX_BYTES
        for item in leases:
            if room <= 0:
                break
            lease = item.lease
            if lease.rollout not in self._sent or item.live is None or len(live) == MAX_ROLLOUTS:
                continue
            token, first = self._sent[lease.rollout]
            if token != lease.token:
                first = 0
            turns = _fitting(item.live(first), min(room, MAX_ROLLOUT_BYTES))
            if turns:
                room -= sum(map(_size, turns))
                live.append(LiveTurns(rollout=lease.rollout, token=lease.token, turns=turns))
        return live

    def answered(self, sent: Sequence[LiveTurns], watched: Iterable[str]) -> None:
        """Note that a heartbeat with these turns arrived, and which rollouts are watched now."""
        # A turn that is being sampled is sent again, as it grows.
        after = {
            live.rollout: (live.token, live.turns[-1].no + (not live.turns[-1].running)) for live in sent
        }
        # A rollout that is watched for the first time, or again, is sent from its beginning.
        self._sent = {rollout: after.get(rollout) or self._sent.get(rollout) or (0, 0) for rollout in watched}


def _size(turn: LiveTurn) -> int:
    calls = sum(len(call.name) + len(call.arguments) for call in turn.tool_calls)
    # A character may take six bytes in JSON.
    return _TURN_BYTES + 6 * (len(turn.text) + calls)


def _fitting(turns: Sequence[LiveTurn], room: int) -> list[LiveTurn]:
    """Return the first turns that fit, but at least one if there is any room at all."""
    chosen: list[LiveTurn] = []
    for turn in turns:
        room -= _size(turn)
        if room < 0 and chosen:
            break
        chosen.append(turn)
        if room < 0:
            break
    return chosen
