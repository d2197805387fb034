"""Bring every backend to its pool's weights, and pause and resume servers as their pools require.

The coordinator is level-based: what is to be done follows from the tables alone, so the successor of
a control plane that was killed at any step continues its work. A backend whose weights are `Updating`
may have been paused by this process, and it stays so until it has been resumed. A server's label is
the pool's version only once its weights were loaded and, where there is a reference, verified.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rollyard_crds.backoff import Backoff
from rollyard_crds.weights import UNVERIFIED
from rollyard_inference.errors import BackendError, BackendRefused, NoSuchCall
from rollyard_inference.transports.interface import Transport
from rollyard_inference.weights.connect import weight_control
from rollyard_inference.weights.control import WeightControl
from sqlalchemy.engine import Connection

from rollyard_api.core.problems import ApiError
from rollyard_api.storage.database import Database
from rollyard_api.weights import backend_targets, backend_weights, update_records
from rollyard_api.weights.backend_targets import PAUSED, Action, BackendTarget, action
from rollyard_api.weights.backend_weights import Superseded
from rollyard_api.weights.limits import UpdateLimits
from rollyard_api.weights.loader import LoadFailed, Unreachable, WeightLoader
from rollyard_api.weights.verification import Forward

log = logging.getLogger("rollyard.api")


def _look(conn: Connection) -> tuple[list[BackendTarget], set[int]]:
    """Return every backend, and the pools without backends in which an update is running."""
    return backend_targets.read(conn), backend_targets.pools_without_backends(conn)


LOAD_ATTEMPTS: Final = 3
"""The number of loads that a server may answer with an error before it is given up."""
_TRY_AGAIN: Final = Backoff(first=0.5, longest=10.0)


@dataclass(slots=True)
class _Tries:
    """The failures of a backend so far."""

    count: int = 0
    again_at: float = 0.0
    loads: int = 0
    of: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Coordinator:
    """The coordinator of a control plane, whose `round` is called periodically."""

    database: Database
    transport: Transport
    forward: Forward
    limits: UpdateLimits
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    _tasks: dict[tuple[int, str], asyncio.Task[None]] = field(default_factory=dict)
    _tries: dict[tuple[int, str], _Tries] = field(default_factory=dict)
    _looked: dict[tuple[int, str], float] = field(default_factory=dict)

    @property
    def _loader(self) -> WeightLoader:
        return WeightLoader(self.database, self.forward, self.name)

    async def round(self) -> None:
        """Start the steps that are due, and leave those that are already running alone."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        targets, alone = await self.database.read(_look)
        known = {target.key for target in targets}
        self._tries = {key: tries for key, tries in self._tries.items() if key in known}
        self._looked = {key: at for key, at in self._looked.items() if key in known}
        running = {
            target.pool.id
            for target in targets
            if target.update is not None and target.update.state == "Running"
        }
        mine = {
            target.update.id for target in targets if target.key in self._tasks and target.update is not None
        }
        if mine:
            await self.database.write(partial(backend_weights.renew, name=self.name, ids=mine), durable=False)
        for pool_id in sorted(running | alone):
            await self.database.write(partial(update_records.settle, pool_id=pool_id))
        now = time.monotonic()
        for target in targets:
            if target.key not in self._tasks and self._due(target, now):
                self._tasks[target.key] = asyncio.create_task(self._guard(target))

    async def close(self) -> None:
        """Cancel all steps where they stand. The next start continues from there."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _due(self, target: BackendTarget, now: float) -> bool:
        what = action(target.pool, target.row)
        if what in ("look", "hold", "watch"):
            if what == "look" and target.pool.policy_index == 0:
                return False
            if now < self._looked.get(target.key, 0.0) + self.limits.look:
                return False
            self._looked[target.key] = now
            return target.row.ready or what == "watch"
        if what == "stale":
            return bool(target.row.weights == "Current")
        tries = self._tries.get(target.key)
        return tries is None or tries.of != target.wanted or now >= tries.again_at

    async def _guard(self, target: BackendTarget) -> None:
        """Do what a backend needs. A failure is recorded in the tables, and the step is tried again later."""
        what = action(target.pool, target.row)
        try:
            await self._do(what, target)
        except Superseded:
            return
        except Unreachable:
            self._later(target, LOAD_ATTEMPTS + 2)
        except (BackendError, LoadFailed) as error:
            await self._failed(target, what, error)
        except ApiError as error:
            log.warning("weights of %s: %s", target.row.url, error.detail)
        except Exception:
            log.exception("weights of %s: unexpected", target.row.url)
            self._later(target, LOAD_ATTEMPTS)
        else:
            if what != "look":
                self._tries.pop(target.key, None)

    async def _do(self, what: Action, target: BackendTarget) -> None:
        if what == "stale":
            await self._mark(target, weights="Stale", weights_message="behind the pool; it is not ready")
            return
        server = await weight_control(self.transport, target.row.url, self.limits)
        if what == "bring":
            await self._loader.bring(target, server)
        elif what == "watch":
            await self._watch(target, server)
        elif what in ("pause", "hold"):
            await self._pause(target, server)
        elif what == "resume":
            await self._resume(target, server)
        else:
            await self._look(target, server)

    def _later(self, target: BackendTarget, more: int = 1, *, load: bool = False) -> _Tries:
        tries = self._tries.get(target.key)
        if tries is None or tries.of != target.wanted:
            tries = self._tries[target.key] = _Tries(of=target.wanted)
        tries.count += more
        tries.loads += load
        tries.again_at = time.monotonic() + _TRY_AGAIN.pause(tries.count)
        return tries

    async def _failed(self, target: BackendTarget, what: Action, error: Exception) -> None:
        message = str(error)
        if what in ("look", "hold", "watch"):
            return
        loading = isinstance(error, LoadFailed)
        tries = self._later(target, load=loading)
        log.warning("weights of %s: %s", target.row.url, message)
        await self.database.write(partial(backend_weights.tell, target=target, message=message))
        if loading and isinstance(error.__cause__, BackendRefused) and target.begun:
            await self._loader.refuse(target, f"{target.row.url}: {message}", refused_by=target.row.url)
        elif loading and tries.loads >= LOAD_ATTEMPTS:
            await self.database.write(
                partial(backend_weights.give_up_loading, target=target, message=message)
            )

    async def _mark(self, target: BackendTarget, **values: Any) -> None:
        await self.database.write(partial(backend_weights.mark, target=target, values=values))

    # -- pausing and looking -------------------------------------------------------------------------

    async def _pause(self, target: BackendTarget, server: WeightControl) -> None:
        if target.row.weights == "Current":
            await self._mark(target, weights="Updating", weights_message="pausing")
        if not await server.is_paused():
            await server.pause(target.pool.pause_mode or "abort")
        if target.row.weights_message != PAUSED:
            await self.database.write(partial(backend_weights.paused, target=target))

    async def _resume(self, target: BackendTarget, server: WeightControl) -> None:
        if target.update is not None:
            with suppress(NoSuchCall):
                label = await server.label()
                if label != target.row.policy_version:
                    message = f"it calls its weights {label!r}: it was restarted"
                    values = {
                        "weights": "Stale",
                        "weights_message": message,
                        "policy_index": update_records.BEHIND,
                    }
                    await self._mark(target, **values)
                    return
        with suppress(NoSuchCall):
            await server.resume()
        await self._mark(target, weights="Current", weights_message="")

    async def _look(self, target: BackendTarget, server: WeightControl) -> None:
        with suppress(NoSuchCall):
            label = await server.label()
            if label in (target.row.policy_version, target.pool.policy_version):
                return
            message = f"it calls its weights {label!r}: it was restarted"
            values = {"weights": "Stale", "weights_message": message, "policy_index": update_records.BEHIND}
            await self._mark(target, **values)

    async def _watch(self, target: BackendTarget, server: WeightControl) -> None:
        """Record that a server has been restarted, once its label is no longer one that we set."""
        if not (await server.label()).startswith(UNVERIFIED):
            await self._mark(target, restart_requested=False)
