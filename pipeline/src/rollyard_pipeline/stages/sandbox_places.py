"""The number of sandboxes that a node may hold at once, for Run and for fresh Eval sandboxes together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import PermanentFailure
from rollyard_pipeline.sandboxes.interface import SandboxProvider

_LOOK_SECONDS: Final = 0.5
"""The time between two checks for room that another process may have made, in seconds."""


class SandboxPlaces:
    """Reserves places for Eval's fresh sandboxes, so that Run's sandboxes never wait for each other.

    A rollout whose Eval wants a fresh sandbox holds two sandboxes for a moment. If Run's sandboxes could take
    every place, all these rollouts would wait forever. Once a job of this worker uses fresh Eval sandboxes,
    Init therefore leaves some places free, and Eval uses no more than those. If the node has a limit, the
    reserved places are part of it: a quarter of the limit, but at least one and at most the number of
    concurrent Evals. Without a limit they are added on top.

    Args:
        provider: Counts the sandboxes of the node. None means that this worker has no sandboxes.
        usual: The number of sandboxes beyond which Init waits if the node has no limit.
        limit: The number of sandboxes that the node may hold. None means that there is no limit.
        evals: The number of rollouts that this worker evaluates at once.
    """

    def __init__(
        self, provider: SandboxProvider | None, *, usual: int, limit: int | None = None, evals: int = 1
    ) -> None:
        self._provider = provider
        self.usual = usual
        """The number of sandboxes beyond which Init waits if the node has no limit."""
        self._limit = limit
        self._kept = max(1, evals)
        if limit is not None:
            self._kept = min(self._kept, max(1, limit // 4))
        self._wanted = False
        self._evaluating: list[HeldLease] = []
        self._entering: list[HeldLease] = []
        self._look = asyncio.Lock()
        self._changed = asyncio.Event()

    def room(self, coming: int) -> int:
        """Return how many more rollouts Init may take.

        This function reads the node's records from disk and should be called in a thread.

        Args:
            coming: The number of this worker's rollouts in Init that have no sandbox yet.
        """
        if self._provider is None:
            return self.usual
        # The only sandbox of a rollout takes a place, wherever it has it.
        fresh = {
            holding.eval_sandbox.id
            for holding in list(self._evaluating)
            if holding.eval_sandbox is not None and _is_second(holding)
        }
        others = len(set(self._provider.in_use()) - fresh)
        return self._for_run() - coming - others

    @asynccontextmanager
    async def for_init(self, holding: HeldLease) -> AsyncIterator[None]:
        """Wait until there is room for one more sandbox of Run, and hold that place.

        Only rollouts with fresh Eval sandboxes use this. More leases may have been granted before the first
        such rollout was known than there is room for.

        Raises:
            PermanentFailure: The node may hold only one sandbox.
        """
        if self._limit is not None and self._limit < 2:
            raise PermanentFailure(
                "stages.eval.sandbox: 'fresh' needs two sandboxes for a moment, and --max-sandboxes is "
                f"{self._limit}; give at least 2",
                "SandboxMissing",
            )
        self._wanted = True
        while self._limit is not None:
            self._changed.clear()
            async with self._look:
                coming = sum(entering.sandbox is None for entering in self._entering)
                if await asyncio.to_thread(self.room, coming) > 0:
                    self._entering.append(holding)
                    break
            await self._change()
        try:
            yield
        finally:
            if holding in self._entering:
                self._entering.remove(holding)
            self._changed.set()

    @asynccontextmanager
    async def for_eval(self, holding: HeldLease) -> AsyncIterator[None]:
        """Wait for a place for Eval's fresh sandbox, and hold it.

        It is one of the reserved places if the rollout holds another sandbox, and any of them otherwise.
        """
        self._wanted |= _is_second(holding)
        while not await self._entered_eval(holding):
            await self._change()
        try:
            yield
        finally:
            self._evaluating.remove(holding)
            self._changed.set()

    async def _change(self) -> None:
        """Wait until this process frees a place, or briefly, because other processes free places too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._changed.wait()

    async def _entered_eval(self, holding: HeldLease) -> bool:
        self._changed.clear()
        async with self._look:
            second = sum(_is_second(evaluating) for evaluating in self._evaluating)
            if _is_second(holding) and second >= self._kept:
                return False
            # Other workers of the node may hold more sandboxes than they should. One Eval always proceeds
            # nevertheless, because only a finished Eval frees a place.
            if self._limit is not None and self._evaluating and self._provider is not None:
                coming = sum(evaluating.eval_sandbox is None for evaluating in self._evaluating)
                if len(await asyncio.to_thread(self._provider.in_use)) + coming >= self._limit:
                    return False
            self._evaluating.append(holding)
            return True

    def _for_run(self) -> int:
        if self._limit is None:
            return self.usual
        return self._limit - self._kept if self._wanted else self._limit


def _is_second(holding: HeldLease) -> bool:
    """Return whether the rollout of an Eval holds the sandbox of Run beside a fresh one."""
    return holding.lease.sandbox is not None
