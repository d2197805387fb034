"""Decide what a backend needs, and by which steps it gets the weights that its pool wants.

`need` says what a backend needs by its row and its pool's row. A backend that needs other weights is brought
to them by the steps of `WeightStep`, one after another: `following` says which one comes next, from the
tables and from what the steps before it have shown. Both decide without asking a server, a table or a clock;
the coordinator carries the steps out. After a kill at any step, the successor begins with the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from rollyard_crds.weights import (
    UNVERIFIED,
    CheckpointSource,
    UpdateStep,
    WeightSource,
    WeightUpdateRequest,
)

from rollyard_api.storage.rows import BackendRow, PoolRow, WeightUpdateRow
from rollyard_api.weights.updates import EarlierLogprobs, progress_of, request_of
from rollyard_api.weights.verification import Comparison, Reference

PAUSED: Final = "paused"
"""The `weights_message` of a backend in a paused pool, once its server has been paused."""
BEHIND: Final = -1
"""The policy_index of a backend whose weights are not known."""

Need = Literal["bring", "stale", "watch", "pause", "hold", "resume", "look"]


def need(pool: PoolRow, row: BackendRow) -> Need:
    """Return what a backend needs, which depends only on its row and its pool's row.

    | need | what is done |
    |---|---|
    | bring | The server gets the pool's weights, by the steps below. |
    | stale | The backend is behind and not ready: it is recorded as Stale. |
    | watch | The server must be restarted: its label is read until it is one that we did not set. |
    | pause | The pool is paused: the server is paused, too. |
    | hold | The server was paused for its pool, and is checked from time to time. |
    | resume | The server may be paused, and its pool is not. |
    | look | The backend is up to date: its label is read from time to time, as it shows a restart. |
    """
    waits = row.restart_requested and row.policy_index == pool.policy_index
    if row.policy_index != pool.policy_index or row.weights in ("Stale", "Failed"):
        if waits:
            return "watch"
        # A backend that we may have paused is handled even though it cannot pass its health check.
        return "bring" if row.ready or row.weights in ("Updating", "Failed") else "stale"
    if pool.paused:
        return "hold" if row.weights == "Updating" and row.weights_message == PAUSED else "pause"
    return "resume" if row.weights == "Updating" else "look"


@dataclass(frozen=True, slots=True)
class BackendTarget:
    """A backend, its pool and the update that both should have, as one read of the tables found them."""

    pool: PoolRow
    row: BackendRow
    update: WeightUpdateRow | None
    """The wanted update, or None where the weights that the server was started with are wanted."""
    chain: tuple[WeightUpdateRow, ...]
    """The updates that every backend had before `update`, the newest first."""

    @property
    def need(self) -> Need:
        """What the backend needs, as `need` says."""
        return need(self.pool, self.row)

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the backend: the pool's id and the URL."""
        return self.pool.id, self.row.url

    @property
    def wanted(self) -> tuple[int, int]:
        """A pair that changes whenever the weights that are wanted change."""
        return self.pool.policy_index, 0 if self.update is None else self.update.id

    @property
    def request(self) -> WeightUpdateRequest | None:
        """The request of the update, or None for the weights that the server was started with."""
        return None if self.update is None else request_of(self.update)

    @property
    def model(self) -> str:
        """The name under which the wanted weights are requested."""
        return self.pool.served_model or self.pool.model

    @property
    def lenient(self) -> bool:
        """Whether the server may lack calls, because no rollout continues across the update."""
        return self.request is not None and self.request.in_flight == "restart"

    @property
    def begun(self) -> bool:
        """Whether the update is in progress, as opposed to repeated for a server that lost its weights.

        Pushed weights are only in the servers that the pool had when they were pushed.
        """
        if self.update is None or self.update.state != "Running":
            return False
        part = progress_of(self.update).get(self.row.url)
        if part is None:
            return not request_of(self.update).source.pushed
        return part.step != "Done"

    @property
    def restored(self) -> bool:
        """Whether the server may hold refused weights, so nothing is trusted without verification."""
        behind = self.row.policy_index == BEHIND
        return bool(self.row.weights == "Failed" and (behind or self.row.restart_requested))


class WeightStep(StrEnum):
    """A step of a backend on its way to the wanted weights. MEASURE to VERIFY follow each other."""

    LOOK = "look"  # Read the server's label of its weights, where it is to be trusted.
    REFER = "refer"  # Find what the wanted weights are compared with.
    MEASURE = "measure"  # Measure what the server gives with the weights that are replaced.
    BEGIN = "begin"  # Record that the backend gets no more rollouts, and that its server may be paused.
    PAUSE = "pause"  # Pause the server.
    LOAD = "load"  # Load every source that the server lacks.
    LABEL = "label"  # Label the weights: as unverified if they are going to be compared.
    FLUSH = "flush"  # Discard what earlier weights have computed.
    RESUME = "resume"  # Let the server sample.
    VERIFY = "verify"  # Compare what the server gives with the reference.
    # One of these is the last step.
    ACCEPT = "accept"  # Set the final label, and record that the backend has the weights.
    KEEP = "keep"  # Resume a server that has the weights, and record it.
    WAIT = "wait"  # Record why the server cannot get the weights for now.
    REFUSE = "refuse"  # Fail the update, which is in progress.
    GIVE_UP = "give up"  # Pause the server and ask for its restart.


LAST: Final = frozenset(
    {WeightStep.ACCEPT, WeightStep.KEEP, WeightStep.WAIT, WeightStep.REFUSE, WeightStep.GIVE_UP}
)
"""The steps after which nothing follows."""
_ORDER: Final = tuple(WeightStep)
RECORDED: Final[dict[WeightStep, UpdateStep]] = {WeightStep.LOAD: "Loading", WeightStep.LABEL: "Verifying"}
"""The state of a backend in the update's record from the beginning of a step."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the steps have shown so far."""

    last: WeightStep | None = None
    """The last step that was carried out."""
    label: str | None = None
    """The server's label of its weights, or None if it has none or is not to be trusted."""
    reference: Reference | None = None
    """What the wanted weights should give."""
    folder: str | None = None
    """The folder that the server was started on, if those weights are wanted and it is known."""
    first_label: str = ""
    """The label of the weights that the server was started with."""
    before: EarlierLogprobs | None = None
    """What the server gives with the weights that are replaced."""
    problem: str = ""
    """Why the weights cannot be loaded or compared."""
    paused_at: float = 0.0
    """The time at which the pause began, in seconds of a monotonic clock."""
    paused: float | None = None
    """The time from pause to resume, in seconds."""
    comparison: Comparison | None = None
    """The result of the comparison with the reference."""

    @property
    def difference(self) -> float | None:
        """The largest difference from the reference, or None if none is finite."""
        return None if self.comparison is None else self.comparison.finite

    @property
    def marked(self) -> bool:
        """Whether the server's label says that its weights were not verified."""
        return (self.label or "").startswith(UNVERIFIED)


def version_of(target: BackendTarget, observation: Observation) -> str:
    """Return the final label of the wanted weights."""
    return observation.first_label if target.update is None else target.update.policy_version


def lacking(target: BackendTarget, observation: Observation) -> tuple[tuple[WeightSource, ...], str]:
    """Return what a server has to load, in order, to get the wanted weights, and what prevents it."""
    if target.update is None:
        first = (
            None
            if observation.folder is None
            else WeightSource(checkpoint=CheckpointSource(path=observation.folder))
        )
        return () if first is None else (first,), ""
    sources: list[WeightSource] = []
    adapters: set[str] = set()
    for update in (target.update, *target.chain):
        current = update.id == target.update.id
        if observation.label is not None and update.policy_version == observation.label and not current:
            break
        source = request_of(update).source
        if source.pushed:
            if current and target.begun:
                # Pushed weights are in the server, are complete and need no earlier ones.
                break
            return (), f"weights {update.policy_version!r} were pushed by the trainer: push them again"
        if source.lora is not None:
            if source.lora.name in adapters:
                continue  # The newer adapter of this name takes its place, and its folder may be gone.
            adapters.add(source.lora.name)
        sources.append(source)
        if source.checkpoint is not None:
            break
    return tuple(reversed(sources)), ""


def _trusts_label(target: BackendTarget) -> bool:
    """Return whether the label was set by the server itself, or for weights that were loaded completely."""
    return target.update is None or target.row.weights in ("Current", "Stale") or _restarted(target)


def _restarted(target: BackendTarget) -> bool:
    """Return whether the server had to be restarted, and has been since, as far as its driver knows."""
    return target.row.weights == "Failed" and not target.restored


def following(target: BackendTarget, observation: Observation) -> tuple[WeightStep, str]:
    """Return the step that comes after `observation.last`, with the reason if it is the last step.

    The weights that a server was started with are loaded and compared as those of an update are. If this
    fails, nobody knows what the server has, so it must be restarted.
    """
    match observation.last:
        case None if _trusts_label(target):
            return WeightStep.LOOK, ""
        case None | WeightStep.LOOK:
            return _after_look(target, observation)
        case WeightStep.REFER:
            return _after_refer(target, observation)
        case WeightStep.PAUSE | WeightStep.LOAD if target.update is None and observation.problem:
            return WeightStep.GIVE_UP, _of_first(
                target, f"it does not load what it had before: {observation.problem}"
            )
        case WeightStep.RESUME if observation.reference is None:
            return WeightStep.ACCEPT, f"not verified: {observation.problem}"
        case WeightStep.VERIFY:
            return _after_verify(target, observation)
        case last:
            return _ORDER[_ORDER.index(last) + 1], ""


def _after_look(target: BackendTarget, observation: Observation) -> tuple[WeightStep, str]:
    """Return whether the server has the weights already, can get them, or has not been restarted."""
    update, row = target.update, target.row
    if update is None:
        return (WeightStep.REFER if row.policy_index == BEHIND or observation.marked else WeightStep.KEEP), ""
    if _restarted(target) and observation.marked:
        return WeightStep.GIVE_UP, "it was not restarted"
    if observation.label == update.policy_version and not target.begun and row.weights == "Stale":
        # Nothing was lost: our label is on weights that were loaded, and verified, before.
        return WeightStep.KEEP, ""
    _, problem = lacking(target, observation)
    return (WeightStep.WAIT, problem) if problem else (WeightStep.REFER, "")


def _after_refer(target: BackendTarget, observation: Observation) -> tuple[WeightStep, str]:
    """Return what becomes of weights that cannot be compared with anything: most may still be used."""
    request = target.request
    if request is None and observation.folder is None:
        return WeightStep.GIVE_UP, _of_first(target, "it does not say which folder it was started on")
    if observation.reference is not None:
        return WeightStep.MEASURE, ""
    if request is None:
        return WeightStep.GIVE_UP, _of_first(
            target, f"what it had before cannot be verified: {observation.problem}"
        )
    if request.require_verified and target.begun:
        return WeightStep.REFUSE, f"cannot be verified: {observation.problem}"
    if target.restored:
        return WeightStep.GIVE_UP, f"what it had before cannot be verified: {observation.problem}"
    if request.require_verified:
        # A restart of the server would not make its weights verifiable.
        return WeightStep.WAIT, f"its weights cannot be verified: {observation.problem}"
    return WeightStep.MEASURE, ""


def _after_verify(target: BackendTarget, observation: Observation) -> tuple[WeightStep, str]:
    """Return whether the weights are the wanted ones."""
    request, comparison = target.request, observation.comparison
    if comparison is not None and comparison.agrees:
        return WeightStep.ACCEPT, ""
    required = request is None or request.require_verified or target.restored
    if comparison is None and not required:
        return WeightStep.ACCEPT, f"not verified: {observation.problem}"
    problem = observation.problem if comparison is None else str(comparison)
    if request is None:
        problem = _of_first(target, f"loaded again, what it had before is wrong too: {problem}")
    return (WeightStep.REFUSE if target.begun else WeightStep.GIVE_UP), problem


def _of_first(target: BackendTarget, problem: str) -> str:
    return f"{target.row.weights_message or 'its weights are not known'}; {problem}"
