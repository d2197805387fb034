"""Bring one backend to the weights that its pool wants (pause, load, resume, verify), or give it up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from rollyard_crds.backendpool import BackendPoolSpec
from rollyard_crds.weights import UNVERIFIED, WeightUpdateRequest
from rollyard_inference.capabilities import FIRST_LABEL
from rollyard_inference.errors import BackendError, BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_inference.weights.control import WeightControl

from rollyard_api.core.codec import loads
from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.storage.database import Database
from rollyard_api.weights import backend_progress, backend_weights, precision, update_records, verification
from rollyard_api.weights.backend_progress import EarlierLogprobs
from rollyard_api.weights.backend_targets import BackendTarget
from rollyard_api.weights.plan import LoadPlan, plan
from rollyard_api.weights.verification import Comparison, Forward, Reference, Unverifiable

MEASURE_SECONDS: Final = 20.0
"""The limit for measuring what a server gives before an update. The server samples in the meantime."""
_COMMON_IDS: Final = 256
"""Every vocabulary has this many ids."""


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
            await self._stale(target, todo.problem)
        reference, why = None, ""
        try:
            reference = await self._reference(target, server, asked)
        except Unverifiable as error:
            if asked.require_verified and target.begun:
                await self.refuse(target, f"cannot be verified: {error}")
                return
            if target.restored:
                await self._give_up(target, server, f"what it had before cannot be verified: {error}")
                return
            if asked.require_verified:
                # A restart of the server would not make its weights verifiable.
                await self._stale(target, f"its weights cannot be verified: {error}")
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
        before = await self._measured(target, server, reference)
        await self._begin(target, fence=lenient or target.restored, before=before)
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
            before = await self._earlier(target, 0)
            label = FIRST_LABEL if before is None else before.label
            problem = await self._reload_first(target, server, before, label)
            if problem:
                known = row.weights_message or "its weights are not known"
                await self._give_up(target, server, f"{known}; {problem}")
                return
        else:
            with suppress(NoSuchCall):
                await server.resume()
        values = {"weights": "Current", "weights_message": "", "policy_index": 0, "restart_requested": False}
        await self._mark(target, **values, **({} if label is None else {"policy_version": label[:128]}))

    async def _reload_first(
        self, target: BackendTarget, server: WeightControl, before: EarlierLogprobs | None, label: str
    ) -> str:
        """Reload and verify the folder that the server was started on; return the problem, or "" if none.

        The server is compared with what it gave itself before the update, since a difference from another
        computation of the same weights may be what the update was refused for.
        """
        folder = before.folder if before is not None else await server.folder()
        if folder is None:
            return "it does not say which folder it was started on"
        try:
            tolerance = await self._tolerance(target, server, Path(folder))
            if before is not None:
                reference = Reference(before.prompt_ids, before.logprobs, tolerance, "earlier")
            else:
                reference = await self.forward.reference(Path(folder), tolerance)
        except Unverifiable as error:
            return f"what it had before cannot be verified: {error}"
        charge = partial(backend_weights.take_charge_of_first, name=self.name, target=target)
        await self.database.write(charge)
        try:
            await server.pause("abort")
            await server.reload(folder)
        except (ServerFailed, BackendRefused, BackendMismatch, NoSuchCall) as error:
            return f"it does not load what it had before: {error}"
        await server.set_label(f"{UNVERIFIED}{label}")
        await server.reset_prefix_cache()
        await server.resume()
        comparison, problem = await self._compare(server, target.pool.model, reference)
        if comparison is None or not comparison.agrees:
            return f"loaded again, what it had before is wrong too: {problem or comparison}"
        await self.database.write(charge)
        await server.set_label(label)
        return ""

    async def _measured(
        self, target: BackendTarget, server: WeightControl, reference: Reference | None
    ) -> EarlierLogprobs | None:
        """Return what the server gives with the weights that the update replaces.

        The result is None if it is not certain that the server has these weights, or if it does not answer.
        """
        assert target.update is not None
        row = target.row
        index = target.chain[0].policy_index if target.chain else 0
        known = row.weights == "Current" and row.policy_index == index and not target.pool.paused
        if not known or not target.begun or update_records.request_of(target.update).source.pushed:
            return None
        ids = verification.fixed_prompt(_COMMON_IDS)
        if reference is not None:
            ids = list(reference.ids[: verification.PROMPT_TOKENS])
        model = update_records.serves(target.chain) or target.pool.model
        try:
            async with asyncio.timeout(MEASURE_SECONDS):
                label = await server.label()
                if label.startswith(UNVERIFIED) or (index and label != row.policy_version):
                    return None
                folder = None if index else await server.folder()
                logprobs = await server.prompt_logprobs(model, ids)
        except (BackendError, TimeoutError):
            return None
        if not all(map(math.isfinite, logprobs)):
            return None
        return EarlierLogprobs(
            policy_index=index, label=label, folder=folder, prompt_ids=tuple(ids), logprobs=tuple(logprobs)
        )

    async def _earlier(self, target: BackendTarget, policy_index: int) -> EarlierLogprobs | None:
        return await self.database.read(
            partial(
                backend_progress.earlier,
                pool_id=target.pool.id,
                url=target.row.url,
                policy_index=policy_index,
            )
        )

    async def _give_up(self, target: BackendTarget, server: WeightControl, message: str) -> None:
        with suppress(BackendError):
            await server.pause("abort")
        with suppress(BackendError):
            await server.set_label(f"{UNVERIFIED}refused")
        await self.database.write(partial(backend_weights.restart, target=target, message=message))

    async def _reference(
        self, target: BackendTarget, server: WeightControl, asked: WeightUpdateRequest
    ) -> Reference:
        assert target.update is not None
        given, checkpoint = asked.reference, asked.source.checkpoint
        folder = None if checkpoint is None else Path(checkpoint.path)
        tolerance = None if given is None else given.tolerance
        if tolerance is None:
            tolerance = await self._tolerance(target, server, folder)
        if target.restored:
            before = await self._earlier(target, target.update.policy_index)
            if before is not None:
                return Reference(before.prompt_ids, before.logprobs, tolerance, "earlier")
        if given is not None:
            return Reference.of(given, tolerance)
        if folder is None:
            raise Unverifiable("no reference was given, and only a checkpoint can be computed with")
        return await self.forward.reference(folder, tolerance)

    async def _tolerance(self, target: BackendTarget, server: WeightControl, folder: Path | None) -> float:
        """Return the tolerance of the data type in which the server computes.

        The type is that of the pool's `--dtype`, or else that of the weights' `config.json`, or else
        bfloat16. Servers may compute in less than a float32 checkpoint has, so they are asked in this case.
        """
        spec = BackendPoolSpec.model_validate(loads(target.pool.spec))
        dtype = precision.asked_dtype(spec.engine)
        if not dtype:
            place = folder or Path(spec.model)
            if place.is_absolute():
                with suppress(Unverifiable):
                    dtype = await self.forward.look(partial(precision.checkpoint_dtype, place))
            if precision.is_full(dtype):
                dtype = await server.dtype() or dtype
        return precision.tolerance(dtype)

    async def _stale(self, target: BackendTarget, message: str) -> NoReturn:
        if target.row.weights_message != message:
            await self._mark(target, weights="Stale", weights_message=message)
        raise Unreachable

    async def _begin(
        self, target: BackendTarget, *, fence: bool, before: EarlierLogprobs | None = None
    ) -> None:
        await self.database.write(
            partial(backend_weights.begin, name=self.name, target=target, fence=fence, before=before)
        )

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
