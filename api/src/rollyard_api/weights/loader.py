"""Bring one backend to the weights that its pool wants (pause, load, resume, verify), or give it up."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rollyard_crds.weights import UNVERIFIED, WeightUpdateRequest
from rollyard_inference.capabilities import FIRST_LABEL
from rollyard_inference.errors import BackendError, BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_inference.weights.control import WeightControl

from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.storage.database import Database
from rollyard_api.weights import backend_weights, update_records, verification
from rollyard_api.weights.backend_targets import BackendTarget
from rollyard_api.weights.plan import LoadPlan, plan
from rollyard_api.weights.verification import Comparison, Forward, Reference, Unverifiable


class LoadFailed(ControlPlaneError):
    """The server answered that it could not load the weights."""

    reason = "LoadFailed"


class Unreachable(ControlPlaneError):
    """The backend cannot be brought to its weights for now. Its `weights_message` says why."""

    reason = "BackendUnreachable"


@dataclass(frozen=True, slots=True)
class WeightLoader:
    """A loader for one control plane, which is called `name` in the tables."""

    database: Database
    forward: Forward
    name: str

    async def bring(self, target: BackendTarget, server: WeightControl) -> None:
        """Bring a backend from any state to the pool's weights, or ask for its restart.

        Raises:
            Superseded: Another update is wanted now, or another control plane owns the update.
            Unreachable: The backend cannot be brought to its weights for now.
            LoadFailed: The server could not load the weights.
            BackendError: The server failed in another step. Another attempt may succeed.
        """
        update, row = target.update, target.row
        if update is None:
            await self._to_first(target, server)
            return
        asked = update_records.request_of(update)
        unverified = row.weights == "Failed" and not target.restored
        if unverified and (await _label(server) or "").startswith(UNVERIFIED):
            await self._give_up(target, server, "it was not restarted")
            return
        label = await _label(server) if row.weights in ("Current", "Stale") or unverified else None
        if label == update.policy_version and not target.begun and row.weights == "Stale":
            # Nothing was lost: our label is on weights that were loaded, and verified, before.
            await self._begin(target, fence=False)
            with suppress(NoSuchCall):
                await server.resume()
            await self.database.write(
                partial(backend_weights.done, target=target, verified=None, comparison=None)
            )
            return
        todo = plan(update, target.chain, label, begun=target.begun)
        if todo.problem:
            if row.weights_message != todo.problem:
                await self._mark(target, weights="Stale", weights_message=todo.problem)
            raise Unreachable
        reference, why = None, ""
        try:
            reference = await self._reference(asked)
        except Unverifiable as error:
            if asked.require_verified and target.begun:
                await self.refuse(target, f"cannot be verified: {error}")
                return
            if target.restored or asked.require_verified:
                await self._give_up(target, server, f"what it had before cannot be verified: {error}")
                return
            why = str(error)
        await self._steps(target, server, asked, todo, reference, why)

    async def refuse(self, target: BackendTarget, message: str, refused_by: str = "") -> None:
        """Fail the update that is in progress, as `update_records.refuse` describes."""
        assert target.update is not None
        await self.database.write(
            partial(
                update_records.refuse,
                pool_id=target.pool.id,
                update_id=target.update.id,
                message=message,
                refused_by=refused_by,
            )
        )

    async def _steps(
        self,
        target: BackendTarget,
        server: WeightControl,
        asked: WeightUpdateRequest,
        todo: LoadPlan,
        reference: Reference | None,
        why: str,
    ) -> None:
        assert target.update is not None
        lenient = asked.in_flight == "restart"
        if target.begun and reference is not None:
            await self.database.write(
                partial(backend_weights.verified_by, target=target, source=reference.source)
            )
        await self._begin(target, fence=lenient or target.restored)
        began = time.monotonic()
        await _unless_missing(server.pause(asked.mode), lenient)
        await self._note(target, step="Loading")
        try:
            for source in todo.sources:
                await server.load(source)
        except (ServerFailed, BackendRefused, BackendMismatch) as error:
            raise LoadFailed(str(error)) from error
        version = target.update.policy_version
        label = version if reference is None else UNVERIFIED + version
        await self._note(target, step="Verifying")
        await _unless_missing(server.set_label(label), lenient)
        await _unless_missing(server.reset_prefix_cache(), lenient)
        await _unless_missing(server.resume(), lenient)
        seconds = time.monotonic() - began
        await self._note(target, step="Verifying", paused_seconds=round(seconds, 4))
        comparison = None
        if reference is not None:
            model = update_records.served_model(target.pool, asked.source) or target.pool.model
            comparison, why = await self._compare(server, model, reference)
            if why and (asked.require_verified or target.restored):
                await self._wrong(target, server, why)
                return
            if comparison is not None and not comparison.agrees:
                await self._wrong(target, server, str(comparison), comparison)
                return
            await _unless_missing(server.set_label(version), lenient)
        await self.database.write(
            partial(
                backend_weights.done,
                target=target,
                verified=comparison is not None,
                comparison=comparison,
                paused=seconds,
                message=f"not verified: {why}" if why else "",
            )
        )

    async def _compare(
        self, server: WeightControl, model: str, reference: Reference
    ) -> tuple[Comparison | None, str]:
        try:
            measured = await server.prompt_logprobs(model, reference.ids)
        except (NoSuchCall, BackendRefused, BackendMismatch) as error:
            return None, str(error)
        return verification.compare(reference, measured), ""

    async def _wrong(
        self, target: BackendTarget, server: WeightControl, message: str, comparison: Comparison | None = None
    ) -> None:
        """Pause a server that has other weights than it should, so it does not sample with them any more."""
        with suppress(BackendError):
            await server.pause("abort")
        if not target.begun:
            await self._give_up(target, server, message)
            return
        difference = None if comparison is None else backend_weights.finite(comparison.max_difference)
        await self._note(target, step="Failed", message=message, max_difference=difference)
        await self.refuse(target, f"{target.row.url}: {message}")

    async def _to_first(self, target: BackendTarget, server: WeightControl) -> None:
        """Bring a backend to the weights that its server was started with."""
        row, label = target.row, await _label(server)
        if row.policy_index == update_records.BEHIND or (label or "").startswith(UNVERIFIED):
            problem = await self._reload_first(target, server)
            if problem:
                before = row.weights_message or "its weights are not known"
                await self._give_up(target, server, f"{before}; {problem}")
                return
            label = FIRST_LABEL
        else:
            with suppress(NoSuchCall):
                await server.resume()
        values = {"weights": "Current", "weights_message": "", "policy_index": 0, "restart_requested": False}
        await self._mark(target, **values, **({} if label is None else {"policy_version": label[:128]}))

    async def _reload_first(self, target: BackendTarget, server: WeightControl) -> str:
        """Reload and verify the folder that the server was started on; return the problem, or "" if none."""
        folder = await server.folder()
        if folder is None:
            return "it does not say which folder it was started on"
        try:
            reference = await self.forward.reference(Path(folder))
        except Unverifiable as error:
            return f"what it had before cannot be verified: {error}"
        charge = partial(backend_weights.take_charge_of_first, name=self.name, target=target)
        await self.database.write(charge)
        try:
            await server.pause("abort")
            await server.reload(folder)
        except (ServerFailed, BackendRefused, BackendMismatch, NoSuchCall) as error:
            return f"it does not load what it had before: {error}"
        await server.set_label(f"{UNVERIFIED}{FIRST_LABEL}")
        await server.reset_prefix_cache()
        await server.resume()
        comparison, problem = await self._compare(server, target.pool.model, reference)
        if comparison is None or not comparison.agrees:
            return f"loaded again, what it had before is wrong too: {problem or comparison}"
        await self.database.write(charge)
        await server.set_label(FIRST_LABEL)
        return ""

    async def _give_up(self, target: BackendTarget, server: WeightControl, message: str) -> None:
        with suppress(BackendError):
            await server.pause("abort")
        with suppress(BackendError):
            await server.set_label(f"{UNVERIFIED}refused")
        await self.database.write(partial(backend_weights.restart, target=target, message=message))

    async def _reference(self, asked: WeightUpdateRequest) -> Reference:
        if asked.reference is not None:
            return Reference.of(asked.reference)
        if asked.source.checkpoint is None:
            raise Unverifiable("no reference was given, and only a checkpoint can be computed with")
        return await self.forward.reference(Path(asked.source.checkpoint.path))

    async def _begin(self, target: BackendTarget, *, fence: bool) -> None:
        await self.database.write(partial(backend_weights.begin, name=self.name, target=target, fence=fence))

    async def _note(self, target: BackendTarget, **values: Any) -> None:
        await self.database.write(partial(backend_weights.note, name=self.name, target=target, values=values))

    async def _mark(self, target: BackendTarget, **values: Any) -> None:
        await self.database.write(partial(backend_weights.mark, target=target, values=values))


async def _label(server: WeightControl) -> str | None:
    try:
        return await server.label()
    except NoSuchCall:
        return None


async def _unless_missing(call: Coroutine[Any, Any, None], lenient: bool) -> None:
    """Await a call. If `lenient`, a server may lack it, since no rollout continues over the update."""
    try:
        await call
    except NoSuchCall:
        if not lenient:
            raise
