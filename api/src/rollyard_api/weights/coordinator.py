"""Bring every backend to its pool's weights, and pause and resume servers as their pools require.

The coordinator is level-based: what is to be done follows from the tables alone, so the successor of
a control plane that was killed at any step continues its work. A backend whose weights are `Updating`
may have been paused by this process, and it stays so until it has been resumed. A server's label is
the pool's version only once its weights were loaded and, where there is a reference, verified.

`rollyard_api.weights.steps` decides what a backend needs and which step comes next. The steps are carried
out here, and `rollyard_api.weights.records` records them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rollyard_crds.backendpool import BackendPoolSpec
from rollyard_crds.weights import UNVERIFIED
from rollyard_inference.capabilities import FIRST_LABEL
from rollyard_inference.errors import BackendError, BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_inference.transports.interface import Transport
from rollyard_inference.weights.connect import weight_control
from rollyard_inference.weights.control import WeightCallLimits, WeightControl
from rollyard_process.backoff import Backoff

from rollyard_api.core.codec import loads
from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.problems import ApiError
from rollyard_api.storage.database import Database
from rollyard_api.weights import checkpoints, records, steps, verification
from rollyard_api.weights.checkpoints import Forward
from rollyard_api.weights.records import Superseded
from rollyard_api.weights.steps import BackendTarget, Need, Observation, WeightStep
from rollyard_api.weights.updates import EarlierLogprobs, serves
from rollyard_api.weights.verification import Reference, Unverifiable

log = logging.getLogger("rollyard.api")

LOAD_ATTEMPTS: Final = 3
"""The number of loads that may fail on a server before it is given up."""
MEASURE_SECONDS: Final = 20.0
"""The limit for measuring what a server gives before an update. The server samples in the meantime."""
_COMMON_IDS: Final = 256
"""Every vocabulary has this many ids."""
_TRY_AGAIN: Final = Backoff(first=0.5, longest=10.0)
_LOOKS: Final = ("look", "hold", "watch")
"""The needs for which a server is only checked."""


class LoadFailed(ControlPlaneError):
    """The server answered that it could not load the weights."""


@dataclass(frozen=True, slots=True)
class UpdateLimits(WeightCallLimits):
    """The time limits of steps, after which they are tried again, and the check interval, in seconds."""

    look: float = 5.0
    """The seconds between two checks of the label of a server that is up to date or awaits its restart."""


@dataclass(slots=True)
class _Pace:
    """When a backend is handled again, and its failures while it needs the same."""

    needed: tuple[Need, int, int]
    again_at: float = 0.0
    failures: int = 0
    loads: int = 0


@dataclass(slots=True)
class Coordinator:
    """The coordinator of a control plane, whose `round` is called periodically."""

    database: Database
    transport: Transport
    forward: Forward
    limits: UpdateLimits
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The name of this control plane as an owner of updates."""
    _tasks: dict[tuple[int, str], asyncio.Task[None]] = field(default_factory=dict)
    _paces: dict[tuple[int, str], _Pace] = field(default_factory=dict)

    async def round(self) -> None:
        """Start what is due, and leave what is already running alone."""
        self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
        targets, running = await self.database.read(records.targets)
        known = {target.key for target in targets}
        self._paces = {key: pace for key, pace in self._paces.items() if key in known}
        mine = {
            target.update.id for target in targets if target.key in self._tasks and target.update is not None
        }
        if mine:
            await self.database.write(partial(records.renew, name=self.name, ids=mine), durable=False)
        for pool_id in sorted(running):
            await self.database.write(partial(records.settle, pool_id=pool_id))
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
        need = target.need
        if need == "stale":
            return target.row.weights == "Current"
        pace = self._pace(target)
        if now < pace.again_at or (need == "look" and target.pool.policy_index == 0):
            return False
        if need in _LOOKS:
            pace.again_at = now + self.limits.look
            return target.row.ready or need == "watch"
        return True

    def _pace(self, target: BackendTarget) -> _Pace:
        needed = (target.need, *target.wanted)
        pace = self._paces.get(target.key)
        if pace is None or pace.needed != needed:
            pace = self._paces[target.key] = _Pace(needed)
        return pace

    def _later(self, target: BackendTarget, failures: int = 1) -> _Pace:
        """Handle a backend again after a pause, which grows with the number of failures."""
        pace = self._pace(target)
        pace.failures += failures
        pace.again_at = time.monotonic() + _TRY_AGAIN.pause(pace.failures)
        return pace

    async def _guard(self, target: BackendTarget) -> None:
        """Do what a backend needs. A failure is recorded in the tables, and the step is tried again later."""
        url = target.row.url
        try:
            try:
                await self._do(target)
            except (BackendError, LoadFailed) as error:
                if target.need not in _LOOKS:
                    await self._failed(target, error)
        except Superseded:
            pass
        except ApiError as error:
            log.warning("weights of %s: %s", url, error.detail)
        except Exception:
            log.exception("weights of %s: unexpected", url)
            self._later(target, LOAD_ATTEMPTS)

    async def _failed(self, target: BackendTarget, error: Exception) -> None:
        message, url, pace = str(error), target.row.url, self._later(target)
        log.warning("weights of %s: %s", url, message)
        loading = isinstance(error, LoadFailed)
        pace.loads += loading
        refused = loading and isinstance(error.__cause__, BackendRefused) and target.begun
        for_good = loading and not refused and pace.loads >= LOAD_ATTEMPTS
        await self._record(records.failed, target, claims=for_good, message=message, for_good=for_good)
        if refused:
            await self._record(records.refuse, target, message=f"{url}: {message}", keeps=True)

    async def _do(self, target: BackendTarget) -> None:
        """Do what a backend needs."""
        if target.need == "stale":
            await self._mark(target, weights="Stale", weights_message="behind the pool; it is not ready")
            return
        server = await weight_control(self.transport, target.row.url, self.limits)
        match target.need:
            case "bring":
                if await self.bring(target, server) is WeightStep.WAIT:
                    self._later(target, LOAD_ATTEMPTS + 2)
            case "pause" | "hold":
                await self._pause(target, server)
            case "resume":
                if target.update is None or not await self._lost(target, server):
                    with suppress(NoSuchCall):
                        await server.resume()
                    await self._mark(target, weights="Current", weights_message="")
            case "look":
                await self._lost(target, server, target.pool.policy_version)
            case "watch":
                if not (await server.label()).startswith(UNVERIFIED):
                    # The label is no longer one that we set, so the server has been restarted.
                    await self._mark(target, restart_requested=False)

    async def _pause(self, target: BackendTarget, server: WeightControl) -> None:
        if target.row.weights == "Current":
            target = await self._mark(target, weights="Updating", weights_message="pausing")
        if not await server.is_paused():
            await server.pause(target.pool.pause_mode or "abort")
        if target.row.weights_message != steps.PAUSED:
            await self._mark(target, weights_message=steps.PAUSED)

    async def _lost(self, target: BackendTarget, server: WeightControl, also: str | None = None) -> bool:
        """Return whether the server's label is neither the one that it had nor `also`, and record it."""
        label = await _label(server)
        if label is None or label in (target.row.policy_version, also):
            return False
        message = f"it calls its weights {label!r}: it was restarted"
        await self._mark(target, weights="Stale", weights_message=message, policy_index=steps.BEHIND)
        return True

    async def bring(self, target: BackendTarget, server: WeightControl) -> WeightStep:
        """Bring a backend from any state to the pool's weights, and return the last step.

        Raises:
            Superseded: The pool wants another update now, or another control plane owns the update.
            LoadFailed: The server could not load the weights.
            BackendError: The server failed in another step. Another attempt may succeed.
        """
        observation = Observation()
        while observation.last is None or observation.last not in steps.LAST:
            step, message = steps.following(target, observation)
            if step in steps.RECORDED:
                await self._record(records.advance, target, step=steps.RECORDED[step])
            try:
                observation = await self._carry_out(step, message, target, server, observation)
            except (LoadFailed, ServerFailed, BackendRefused, BackendMismatch, NoSuchCall) as error:
                if target.update is not None or step not in (WeightStep.PAUSE, WeightStep.LOAD):
                    raise
                observation = replace(observation, problem=str(error))
            observation = replace(observation, last=step)
        return observation.last

    async def _carry_out(
        self,
        step: WeightStep,
        message: str,
        target: BackendTarget,
        server: WeightControl,
        observation: Observation,
    ) -> Observation:
        """Carry out a step, and return what is known after it."""
        version = steps.version_of(target, observation)
        # No rollout continues across such an update, so the server may lack calls.
        may_lack = suppress(NoSuchCall) if target.lenient else nullcontext()
        match step:
            case WeightStep.LOOK:
                return replace(observation, label=await _label(server))
            case WeightStep.REFER:
                return await self._refer(target, server, observation)
            case WeightStep.MEASURE:
                return replace(observation, before=await self._measure(target, server, observation.reference))
            case WeightStep.BEGIN:
                await self._record(records.begin, target, observation=observation)
            case WeightStep.PAUSE:
                observation = replace(observation, paused_at=time.monotonic())
                with may_lack:
                    await server.pause("abort" if target.request is None else target.request.mode)
            case WeightStep.LOAD:
                try:
                    for source in steps.lacking(target, observation)[0]:
                        await server.load(source)
                except (ServerFailed, BackendRefused, BackendMismatch) as error:
                    raise LoadFailed(str(error)) from error
            case WeightStep.LABEL:
                label = version if observation.reference is None else UNVERIFIED + version
                with may_lack:
                    await server.set_label(label)
            case WeightStep.FLUSH:
                with may_lack:
                    await server.reset_prefix_cache()
            case WeightStep.RESUME:
                with may_lack:
                    await server.resume()
                seconds = time.monotonic() - observation.paused_at
                await self._record(records.advance, target, paused_seconds=round(seconds, 4))
                return replace(observation, paused=seconds)
            case WeightStep.VERIFY:
                assert observation.reference is not None
                try:
                    measured = await server.prompt_logprobs(target.model, observation.reference.ids)
                except (NoSuchCall, BackendRefused, BackendMismatch) as error:
                    return replace(observation, problem=str(error))
                return replace(observation, comparison=verification.compare(observation.reference, measured))
            case WeightStep.ACCEPT | WeightStep.KEEP:
                # Only the owner of the update may change the server now.
                await self._record(records.advance, target)
                if step is WeightStep.KEEP:
                    with suppress(NoSuchCall):
                        await server.resume()
                elif observation.reference is not None:
                    with may_lack:
                        await server.set_label(version)
                await self._record(records.done, target, observation=observation, message=message)
            case WeightStep.WAIT:
                if target.row.weights_message != message:
                    await self._mark(target, weights="Stale", weights_message=message)
            case WeightStep.REFUSE:
                if observation.last is WeightStep.VERIFY:
                    # It has other weights than it should, so it must no longer sample with them.
                    with suppress(BackendError):
                        await server.pause("abort")
                    part = {"step": "Failed", "message": message, "max_difference": observation.difference}
                    await self._record(records.advance, target, **part)
                    message = f"{target.row.url}: {message}"
                await self._record(records.refuse, target, message=message)
            case WeightStep.GIVE_UP:
                with suppress(BackendError):
                    await server.pause("abort")
                with suppress(BackendError):
                    await server.set_label(f"{UNVERIFIED}refused")
                await self._record(records.restart, target, message=message)
        return observation

    async def _refer(
        self, target: BackendTarget, server: WeightControl, observation: Observation
    ) -> Observation:
        """Find the reference of the wanted weights, and for the first weights also their folder and label.

        A server that may hold refused weights is compared with what it gave itself before the update, since a
        difference from another computation of the same weights may be what the update was refused for.
        """
        request, earlier, folder = target.request, None, None
        if request is None or target.restored:
            pool, url = target.pool, target.row.url
            read = partial(records.earlier, pool_id=pool.id, url=url, policy_index=pool.policy_index)
            earlier = await self.database.read(read)
        if request is None:
            folder = await server.folder() if earlier is None else earlier.folder
            label = FIRST_LABEL if earlier is None else earlier.label
            observation = replace(observation, folder=folder, first_label=label)
        elif request.source.checkpoint is not None:
            folder = request.source.checkpoint.path
        path = None if folder is None else Path(folder)
        stated = None if request is None else request.reference
        try:
            tolerance = None if stated is None else stated.tolerance
            if tolerance is None:
                tolerance = await self._tolerance(target, server, path)
            if earlier is not None:
                reference = Reference(earlier.prompt_ids, earlier.logprobs, tolerance, "earlier")
            elif stated is not None:
                prompt = (tuple(stated.prompt_ids), tuple(stated.logprobs))
                reference = Reference(*prompt, tolerance, "reference")
            elif path is None:
                raise Unverifiable(
                    "no reference was given, and one can be computed only from the folder of a whole model"
                )
            else:
                reference = await self.forward.reference(path, tolerance)
        except Unverifiable as error:
            return replace(observation, problem=str(error))
        return replace(observation, reference=reference)

    async def _tolerance(self, target: BackendTarget, server: WeightControl, folder: Path | None) -> float:
        """Return the tolerance of the data type in which the server computes.

        The type is that of the pool's `--dtype`, or else that of the weights' `config.json`, or else
        bfloat16. Servers may compute in less than a float32 checkpoint has, so they are asked in this case.
        """
        spec = BackendPoolSpec.model_validate(loads(target.pool.spec))
        dtype = verification.asked_dtype(spec.engine)
        if not dtype:
            path = folder or Path(spec.model)
            if path.is_absolute():
                with suppress(Unverifiable):
                    dtype = await self.forward.look(partial(checkpoints.checkpoint_dtype, path))
            if verification.is_full(dtype):
                dtype = await server.dtype() or dtype
        return verification.tolerance(dtype)

    async def _measure(
        self, target: BackendTarget, server: WeightControl, reference: Reference | None
    ) -> EarlierLogprobs | None:
        """Return what the server gives with the weights that the update replaces.

        The result is None if it is not certain that the server has these weights, or if it does not answer.
        """
        row, request = target.row, target.request
        index = target.chain[0].policy_index if target.chain else 0
        known = row.weights == "Current" and row.policy_index == index and not target.pool.paused
        if not known or not target.begun or request is None or request.source.pushed:
            return None
        ids = verification.fixed_prompt(_COMMON_IDS)
        if reference is not None:
            ids = list(reference.ids[: verification.PROMPT_TOKENS])
        model = serves(target.chain) or target.pool.model
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

    async def _record(self, operation: Callable[..., None], target: BackendTarget, **values: Any) -> None:
        """Call an operation of `records.as_owner`, which raises Superseded if this is not the owner."""
        owned = partial(records.as_owner, name=self.name, target=target, operation=operation)
        await self.database.write(partial(owned, **values))

    async def _mark(self, target: BackendTarget, **values: Any) -> BackendTarget:
        """Write columns of a backend, and return the target with them."""
        await self.database.write(partial(records.mark, target=target, values=values))
        return replace(target, row=replace(target.row, **values))


async def _label(server: WeightControl) -> str | None:
    """Return the server's label of its weights, or None if it has none."""
    try:
        return await server.label()
    except NoSuchCall:
        return None
