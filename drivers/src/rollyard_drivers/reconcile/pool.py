"""The reconcile of backend pools, which every driver uses. Like the reconcile of jobs, it is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus
from rollyard_crds.backendpool import BackendWeights

from rollyard_drivers.reconcile.conditions import ConditionUpdate, find, holds, updated
from rollyard_drivers.reconcile.naming import child_name, made_of, owner_of
from rollyard_drivers.reconcile.plan import (
    STARTING,
    TEMPLATE_NOT_ALLOWED,
    Launch,
    ObservedPool,
    ObservedWorkload,
    Plan,
    Profile,
    Stop,
    Workload,
)
from rollyard_drivers.reconcile.workloads import (
    WorkloadPlan,
    earliest,
    keep,
    restart_delay,
    restart_pause,
    restarts_in_a_row,
)

BACKEND_INDEX: Final = "$(BACKEND_INDEX)"
_PROFILE: Final = Profile()


def pool_workloads(pool: BackendPool, profile: Profile = _PROFILE) -> tuple[Workload, ...]:
    """Return the backends that a pool wants. An external pool wants none."""
    engine = pool.spec.engine
    if engine.type == "external":
        return ()
    owner = owner_of(pool)

    def of(index: int, text: str) -> str:
        return text.replace(BACKEND_INDEX, str(index))

    return tuple(
        Workload(
            name=child_name(owner, "backend", index),
            kind="backend",
            owner=owner,
            index=index,
            engine=engine.type,
            model=pool.spec.model,
            command=tuple(engine.command),
            args=tuple(of(index, arg) for arg in engine.args),
            env=tuple((name, of(index, value)) for name, value in sorted(engine.env.items())),
            gpus=engine.resources.gpu if engine.resources is not None else 0,
            made_of=made_of(pool.spec.template, pool.metadata.labels, profile),
        )
        for index in range(pool.spec.replicas)
    )


def _time_left(
    workload: ObservedWorkload, pool: BackendPool, now: datetime, profile: Profile
) -> float | None:
    """Return the seconds after which a backend that does not answer counts as hung.

    The result is None if the backend answers, is gone, or has not begun to start.
    """
    if workload.state == "starting":
        if workload.pending:
            return None
        limit = max(pool.spec.engine.start_timeout_seconds, restart_delay(workload.restarts, profile))
        return limit - (now - workload.started_at).total_seconds()
    if workload.state == "running" and not workload.ready and workload.unready_since is not None:
        return profile.unready_seconds - (now - workload.unready_since).total_seconds()
    return None


def _backends(
    pool: BackendPool, observed: ObservedPool, names: Iterable[str], drain: Iterable[str]
) -> list[BackendStatus]:
    """Return the status of each backend.

    The fields that the control plane fills (counts, weights, circuit) are not changed.
    """
    if pool.spec.engine.type == "external":
        return list(observed.external)
    names, drain = set(names), set(drain)
    reported = {backend.url: backend for backend in pool.status.backends}
    # The control plane does not know a new backend yet, and only the first weights need not be brought to it.
    weights: BackendWeights = "Stale" if pool.status.policy_version else "Current"
    out = []
    for workload in observed.workloads:
        if workload.name in names and workload.url and workload.state in ("starting", "running"):
            before = reported.get(workload.url) or BackendStatus(url=workload.url, weights=weights)
            message = workload.message[:1024]
            if workload.ready:
                message = before.message if before.ready and before.weights != "Current" else ""
            changes = {
                "ready": workload.ready and workload.state == "running",
                "draining": workload.name in drain,
                "policy_version": workload.policy_version or before.policy_version,
                "message": message,
            }
            out.append(before.model_copy(update=changes))
    return out


@dataclass(frozen=True, slots=True)
class _Stops:
    """The backends to stop now."""

    stop: tuple[Stop, ...]
    troubles: tuple[str, ...]
    """One line for each backend that has to be restarted."""
    looping: bool
    """Whether one of them was restarted for its weights before."""
    requeue_after: float | None


def _stops(
    pool: BackendPool,
    desired: Mapping[str, Workload],
    observed: ObservedPool,
    fleet: WorkloadPlan,
    now: datetime,
    profile: Profile,
) -> _Stops:
    """Return everything that has to be stopped.

    A backend with wrong weights is stopped once its restart is due. It takes no rollouts until then.
    """
    requested = {
        backend.url: backend.message for backend in pool.status.backends if backend.restart_requested
    }
    stops, troubles = list(fleet.stop), []
    waits: list[float] = []
    looping = False
    already = {stop.name for stop in stops}
    for current in observed.workloads:
        if current.name in already or current.state not in ("starting", "running"):
            continue
        left = _time_left(current, pool, now, profile)
        restarts = restarts_in_a_row(current, "backend", profile, now)
        if left is not None and left <= 0:
            detail = f" ({current.message})" if current.message not in ("", STARTING) else ""
            how = f"did not answer{detail}"
            troubles.append(f"{current.name} does not answer{detail}; restarting it")
        elif current.url in requested:
            how = "had wrong weights" + (f" ({requested[current.url]})" if requested[current.url] else "")
            looping = looping or restarts > 0
            left = restart_pause(current, "backend", restarts, profile, now)
            due = f"in {left:.0f} s" if left > 0 else "now"
            troubles.append(f"{current.name} has wrong weights; restart {restarts + 1} {due}")
            if left > 0:
                waits.append(left)
                continue
        else:
            continue
        again = None
        if (workload := desired.get(current.name)) is not None:
            again = Launch(workload, restarts + 1, how)
        stops.append(Stop(current.name, profile.stop_seconds, again))
    return _Stops(tuple(stops), tuple(troubles), looping, earliest(waits))


def _takes_rollouts(backend: BackendStatus) -> bool:
    return backend.ready and not backend.draining and backend.weights == "Current"


def _troubles(
    observed: ObservedPool, backends: Sequence[BackendStatus], now: datetime, profile: Profile
) -> tuple[list[str], list[str], float | None]:
    """Return what is wrong with backends, what only keeps them from rollouts for now, and when that changes.

    A backend that has just started has to be brought to the pool's weights first. This is nothing wrong
    unless it takes as long as a server may be silent.
    """
    # The troubles of the fleet already include the pods that have not begun, with the reason.
    begun: dict[str, datetime | None] = {backend.url: None for backend in observed.external}
    begun |= {workload.url: workload.ready_since for workload in observed.workloads if not workload.pending}
    troubles, behind, waits = [], [], []
    for backend in backends:
        if backend.message in ("", STARTING) or backend.weights == "Updating" or backend.url not in begun:
            continue
        text = backend.message if backend.url in backend.message else f"{backend.url}: {backend.message}"
        since = begun[backend.url]
        left = 0.0 if since is None else profile.unready_seconds - (now - since).total_seconds()
        if backend.ready and backend.weights == "Stale" and left > 0:
            behind.append(text)
            waits.append(left)
        else:
            troubles.append(text)
    return troubles, behind, earliest(waits)


def reconcile_pool(
    pool: BackendPool, observed: ObservedPool, now: datetime, profile: Profile = _PROFILE
) -> Plan[BackendPoolStatus]:
    """Return the plan for `pool` at this time.

    The pool is ready when at least one backend takes rollouts, and stays so while weights are updated.
    """
    desired = () if observed.refused else pool_workloads(pool, profile)
    leaving = retire(desired, observed.workloads, pool.status.backends, now, profile)
    # Backends that drain, or that still serve before they drain, are left alone. All others are kept in the
    # wanted state.
    alone = leaving.drain | leaving.waiting
    fleet = keep(
        tuple(workload for workload in desired if workload.name not in alone),
        tuple(current for current in observed.workloads if current.name not in alone),
        now,
        profile,
        profile.stop_seconds,
    )
    by_name = {workload.name: workload for workload in desired}
    stops = _stops(pool, by_name, observed, fleet, now, profile)
    stopped = {stop.name for stop in stops.stop}
    # A backend that is being stopped is reported as gone immediately, so no rollout is routed to it
    # meanwhile.
    drain = leaving.drain - stopped
    names = ({workload.name for workload in desired} | drain) - stopped
    backends = _backends(pool, observed, names, drain)
    external = pool.spec.engine.type == "external"
    expected = len(observed.external) if external else len(desired)
    wrong, behind, trouble_changes = _troubles(observed, backends, now, profile)
    troubles = [*fleet.troubles, *stops.troubles, *wrong]
    ready = sum(map(_takes_rollouts, backends))
    claims: tuple[ConditionUpdate, ...] = (
        _ready(pool.status, backends, ready, expected, [*troubles, *behind]),
        _progressing(pool, observed, fleet, drain, backends, expected),
        _degraded(pool.status, troubles, fleet.crash_looping or stops.looping, ready >= expected),
    )
    if observed.refused:
        # Backends that an earlier installation started are drained, and nothing replaces them.
        refusals = (
            ConditionUpdate(claim.type, False, TEMPLATE_NOT_ALLOWED, observed.refused) for claim in claims[:2]
        )
        claims = (*refusals, claims[2])
    status = pool.status.model_copy(
        update={
            "conditions": updated(pool.status.conditions, claims, pool.metadata.generation, now),
            "observed_generation": pool.metadata.generation or 0,
            "replicas": len(backends),
            "ready_replicas": ready,
            "ready_text": f"{ready}/{expected if external else pool.spec.replicas}",
            "selector": f"rollyard.dev/pool={pool.metadata.name}",
            "backends": backends,
        }
    )
    checks = (
        _time_left(current, pool, now, profile)
        for current in observed.workloads
        if current.name not in stopped
    )
    changes = (fleet.requeue_after, leaving.requeue_after, stops.requeue_after, trouble_changes, *checks)
    return Plan(
        status=status,
        launch=fleet.launch,
        stop=stops.stop,
        drain=drain,
        requeue_after=earliest(changes),
    )


def _ready(
    before: BackendPoolStatus,
    backends: Sequence[BackendStatus],
    ready: int,
    expected: int,
    troubles: list[str],
) -> ConditionUpdate:
    if ready:
        return ConditionUpdate("Ready", True, "BackendsReady", f"{ready} of {expected} backends are ready")
    if not expected:
        return ConditionUpdate("Ready", False, "NoBackends", "the pool has replicas 0")
    updating = sum(backend.ready and backend.weights == "Updating" for backend in backends)
    if updating and holds(before.conditions, "Ready"):
        text = f"{updating} of {expected} backends are paused or get new weights"
        return ConditionUpdate("Ready", True, "WeightsUpdating", text)
    return ConditionUpdate(
        "Ready", False, "NoBackendReady", "; ".join(troubles) or "the backends are starting"
    )


def _progressing(
    pool: BackendPool,
    observed: ObservedPool,
    fleet: WorkloadPlan,
    drain: frozenset[str],
    backends: Sequence[BackendStatus],
    expected: int,
) -> ConditionUpdate:
    if drain:
        names = ", ".join(sorted(drain))
        return ConditionUpdate(
            "Progressing", True, "Draining", f"{names}: no new rollouts, those it has may end"
        )
    ready = sum(
        _takes_rollouts(backend) or (backend.ready and backend.weights == "Updating") for backend in backends
    )
    if ready >= expected:
        return ConditionUpdate("Progressing", False, "Complete")
    text = f"{ready} of {expected} backends are ready"
    if fleet.waiting:
        text += f"; {'; '.join(fleet.waiting)}"
    starting = sorted(
        workload.name
        for workload in observed.workloads
        if workload.state == "starting" and not workload.pending
    )
    if starting and pool.spec.engine.type == "vllm":
        text += (
            f"; {', '.join(starting)}: vLLM loads the model, which takes from half a minute to many; "
            f"at most {pool.spec.engine.start_timeout_seconds} s (engine.startTimeoutSeconds)"
        )
    return ConditionUpdate("Progressing", True, "Starting", text)


def _degraded(
    before: BackendPoolStatus, troubles: list[str], crash_looping: bool, complete: bool
) -> ConditionUpdate:
    """Return the condition Degraded.

    Args:
        before: The pool's status until now.
        troubles: One line for each thing that is wrong.
        crash_looping: Whether a backend was restarted more than once in a row.
        complete: Whether every wanted backend takes rollouts. Until then, nothing shows that a trouble of
            the past is over.
    """
    if not troubles:
        old = find(before.conditions, "Degraded")
        if complete or old is None or old.status != "True":
            return ConditionUpdate("Degraded", False, "Healthy")
        return ConditionUpdate("Degraded", True, old.reason, old.message)
    reason = "CrashLoopBackOff" if crash_looping else "BackendsFailing"
    return ConditionUpdate("Degraded", True, reason, "; ".join(troubles))


@dataclass(frozen=True, slots=True)
class Retirement:
    """The backends of a pool that are being removed."""

    drain: frozenset[str]
    """The backends that take no new rollouts and may still have some."""
    waiting: frozenset[str]
    """The backends that have an old spec and serve until they are replaced."""
    requeue_after: float | None


def _serves(workload: ObservedWorkload | None, known: Mapping[str, BackendStatus]) -> bool:
    """Return whether a backend takes rollouts."""
    if (
        workload is None
        or workload.state != "running"
        or not workload.ready
        or workload.draining_since is not None
    ):
        return False
    status = known.get(workload.url)
    return status is None or status.weights == "Current"


def _left(
    workload: ObservedWorkload, known: Mapping[str, BackendStatus], now: datetime, profile: Profile
) -> float:
    """Return the seconds for which the backend may still have rollouts.

    The result is 0 if the backend has none, or if its time is over.
    """
    if workload.draining_since is None:
        return profile.drain_seconds
    left = profile.drain_seconds - (now - workload.draining_since).total_seconds()
    status = known.get(workload.url)
    # The control plane's count is meaningful only once the control plane itself reports that the backend
    # drains.
    if status is not None and status.draining and not status.active_rollouts:
        return 0.0
    return max(0.0, left)


def retire(
    desired: Iterable[Workload],
    observed: Iterable[ObservedWorkload],
    reported: Iterable[BackendStatus],
    now: datetime,
    profile: Profile,
) -> Retirement:
    """Return the backends that drain now, and the outdated ones that still serve.

    A backend that does not serve (because it starts, or is not healthy) needs no draining. With one replica,
    there is no other backend to wait for. With more, the next one drains once all others serve.
    """
    desired = tuple(desired)
    there = {current.name: current for current in observed}
    known = {status.url: status for status in reported}
    names = {workload.name for workload in desired}
    drain: set[str] = set()
    waits: list[float | None] = []

    def drains(current: ObservedWorkload) -> None:
        left = _left(current, known, now, profile)
        if left > 0:
            drain.add(current.name)
            waits.append(left)

    for current in there.values():
        if current.name not in names and current.state == "running" and current.ready:
            drains(current)
    outdated = [
        there[workload.name]
        for workload in desired
        if workload.name in there
        and there[workload.name].spec_hash != workload.spec_hash
        and there[workload.name].state == "running"
        and there[workload.name].ready
    ]
    # The backend that drains already comes first. A second one waits until the successor of the first serves.
    outdated.sort(key=lambda current: current.draining_since is None)
    waiting: set[str] = set()
    for index, current in enumerate(outdated):
        peers = (there.get(workload.name) for workload in desired if workload.name != current.name)
        if index == 0 and (current.draining_since is not None or all(_serves(peer, known) for peer in peers)):
            drains(current)
        else:
            waiting.add(current.name)
    return Retirement(frozenset(drain), frozenset(waiting), earliest(waits))
