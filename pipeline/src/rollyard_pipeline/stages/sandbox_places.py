"""How many sandboxes a node may hold at once, those of Run and the fresh ones of Eval together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import SandboxMissing
from rollyard_pipeline.sandboxes.interface import SandboxProvider

_LOOK_SECONDS: Final = 0.5
"""Between looks for room that another process may make."""


class SandboxPlaces:
    """Keeps places free for Eval's fresh sandboxes, so that sandboxes of Run never wait for each other.

    A rollout whose Eval wants a fresh sandbox holds two for a moment. If Run's could take every place, all of
    them would wait for ever; so Init leaves some free once a job of this worker evaluates in fresh ones, and
    Eval uses no more than those. With a limit that was given for the node the places come out of it: a
    quarter, at least one, at most as many as Eval has. Without a limit they come on top.

    Args:
        provider: counts what the node holds; None: no sandboxes here.
        usual: sandboxes beyond which Init waits where the node has no limit.
        limit: sandboxes that the node may hold; None: no such limit.
        evals: rollouts that this worker evaluates at once.
    """

    def __init__(
        self, provider: SandboxProvider | None, *, usual: int, limit: int | None = None, evals: int = 1
    ) -> None:
        self._provider = provider
        self._usual = usual
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
        """How many more rollouts Init may take; it reads the node's records: call it in a thread.

        Args:
            coming: rollouts in Init here that have no sandbox yet.
        """
        if self._provider is None:
            return self._usual
        fresh = {held.eval_sandbox.id for held in list(self._evaluating) if held.eval_sandbox is not None}
        of_run = len(set(self._provider.in_use()) - fresh)
        return self._for_run() - coming - of_run

    @asynccontextmanager
    async def for_init(self, held: HeldLease) -> AsyncIterator[None]:
        """Waits until there is room for one more sandbox of Run. Only for jobs with fresh Eval sandboxes.

        Leases that came before the first such job was known may be more than there is room for.

        Raises:
            SandboxMissing: the node may hold one sandbox only.
        """
        if self._limit is not None and self._limit < 2:
            raise SandboxMissing(
                "stages.eval.sandbox: 'fresh' needs two sandboxes for a moment, and --max-sandboxes is "
                f"{self._limit}; give at least 2"
            )
        self._wanted = True
        while self._limit is not None:
            self._changed.clear()
            async with self._look:
                coming = sum(other.sandbox is None for other in self._entering)
                if await asyncio.to_thread(self.room, coming) > 0:
                    self._entering.append(held)
                    break
            await self._change()
        try:
            yield
        finally:
            if held in self._entering:
                self._entering.remove(held)
            self._changed.set()

    @asynccontextmanager
    async def for_eval(self, held: HeldLease) -> AsyncIterator[None]:
        """Waits for one of the places that are kept for Eval's fresh sandboxes."""
        self._wanted = True
        while not await self._entered_eval(held):
            await self._change()
        try:
            yield
        finally:
            self._evaluating.remove(held)
            self._changed.set()

    async def _change(self) -> None:
        """Waits until a place here is free, or a moment: other processes of the node make room, too."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._changed.wait()

    async def _entered_eval(self, held: HeldLease) -> bool:
        self._changed.clear()
        async with self._look:
            if len(self._evaluating) >= self._kept:
                return False
            # Other workers of the node may hold more than they should. One Eval at a time goes ahead all the
            # same, as nothing but an Eval ever makes room.
            if self._limit is not None and self._evaluating and self._provider is not None:
                coming = sum(other.eval_sandbox is None for other in self._evaluating)
                if len(await asyncio.to_thread(self._provider.in_use)) + coming >= self._limit:
                    return False
            self._evaluating.append(held)
            return True

    def _for_run(self) -> int:
        if self._limit is None:
            return self._usual
        return self._limit - self._kept if self._wanted else self._limit
