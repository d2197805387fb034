"""The reconcile of backend pools, which every driver uses. Like the reconcile of jobs, it is pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus

from rollyard_drivers.reconcile.conditions import ConditionUpdate, updated
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
from rollyard_drivers.reconcile.rolling_update import retire
from rollyard_drivers.reconcile.workloads import WorkloadPlan, earliest, keep, restarts_in_a_row

BACKEND_INDEX = "$(BACKEND_INDEX)"
_PROFILE = Profile()


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


def _time_left(seen: ObservedWorkload, pool: BackendPool, now: datetime, profile: Profile) -> float | None:
    """Return the seconds after which a backend that does not answer counts as hung.

    The result is None if the backend answers, is gone, or has not begun to start.
    """
    if seen.state == "starting":
        if seen.pending:
            return None
        return pool.spec.engine.start_timeout_seconds - (now - seen.started_at).total_seconds()
    if seen.state == "running" and not seen.ready and seen.unready_since is not None:
        return profile.unready_seconds - (now - seen.unready_since).total_seconds()
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
    out = []
    for seen in observed.workloads:
        if seen.name in names and seen.url and seen.state in ("starting", "running"):
            before = reported.get(seen.url) or BackendStatus(url=seen.url)
            changes = {
                "ready": seen.ready and seen.state == "running",
                "draining": seen.name in drain,
                "policy_version": seen.policy_version or before.policy_version,
                "message": "" if seen.ready else seen.message[:1024],
            }
            out.append(before.model_copy(update=changes))
    return out


def _stops(
    pool: BackendPool,
    wanted: Mapping[str, Workload],
    observed: ObservedPool,
    fleet: WorkloadPlan,
    now: datetime,
    profile: Profile,
) -> tuple[tuple[Stop, ...], list[str]]:
    """Return everything that has to be stopped, and a line for each backend that has to be restarted."""
    requested = {backend.url for backend in pool.status.backends if backend.restart_requested}
    stops, troubles = list(fleet.stop), []
    already = {stop.name for stop in stops}
    for seen in observed.workloads:
        if seen.name in already or seen.state not in ("starting", "running"):
            continue
        left = _time_left(seen, pool, now, profile)
        if left is not None and left <= 0:
            detail = f" ({seen.message})" if seen.message not in ("", STARTING) else ""
            how = f"did not answer{detail}"
            troubles.append(f"{seen.name} does not answer{detail}; restarting it")
        elif seen.url in requested:
            how = "had wrong weights"
            troubles.append(f"{seen.name} has wrong weights; restarting it")
        else:
            continue
        again = None
        if (workload := wanted.get(seen.name)) is not None:
            again = Launch(workload, restarts_in_a_row(seen, profile, now) + 1, how)
        stops.append(Stop(seen.name, profile.stop_seconds, again))
    return tuple(stops), troubles


def reconcile_pool(
    pool: BackendPool, observed: ObservedPool, now: datetime, profile: Profile = _PROFILE
) -> Plan[BackendPoolStatus]:
    """Return the plan for `pool` at this time.

    The pool is ready when at least one backend takes rollouts.
    """
    wanted = () if observed.refused else pool_workloads(pool, profile)
    leaving = retire(wanted, observed.workloads, pool.status.backends, now, profile)
    # Backends that drain, or that still serve before they drain, are left alone. All others are kept in the
    # wanted state.
    alone = leaving.drain | leaving.waiting
    fleet = keep(
        tuple(workload for workload in wanted if workload.name not in alone),
        tuple(seen for seen in observed.workloads if seen.name not in alone),
        now,
        profile,
        profile.stop_seconds,
    )
    by_name = {workload.name: workload for workload in wanted}
    stops, restarts = _stops(pool, by_name, observed, fleet, now, profile)
    stopped = {stop.name for stop in stops}
    # A backend that is being stopped is reported as gone immediately, so no rollout is routed to it
    # meanwhile.
    drain = leaving.drain - stopped
    names = ({workload.name for workload in wanted} | drain) - stopped
    backends = _backends(pool, observed, names, drain)
    ready = sum(backend.ready and not backend.draining for backend in backends)
    external = pool.spec.engine.type == "external"
    expected = len(observed.external) if external else len(wanted)
    troubles = [*fleet.troubles, *restarts]
    # The troubles already include the pods that have not begun, with the reason.
    begun = {seen.url for seen in observed.workloads if not seen.pending} | {
        one.url for one in observed.external
    }
    troubles += [
        _trouble(backend)
        for backend in backends
        if backend.message not in ("", STARTING) and backend.url in begun
    ]
    claims: tuple[ConditionUpdate, ...] = (
        _ready(ready, expected, troubles),
        _progressing(pool, observed, fleet, drain, ready, expected),
        _degraded(fleet, troubles),
    )
    if observed.refused:
        # Backends that an earlier installation started are drained, and nothing replaces them.
        refusals = (
            ConditionUpdate(one.type, False, TEMPLATE_NOT_ALLOWED, observed.refused) for one in claims[:2]
        )
        claims = (*refusals, claims[2])
    status = pool.status.model_copy(
        update={
            "conditions": updated(pool.status.conditions, claims, pool.metadata.generation, now),
            "observed_generation": pool.metadata.generation or 0,
            "replicas": len(backends),
            "ready_replicas": ready,
            "selector": f"rollyard.dev/pool={pool.metadata.name}",
            "backends": backends,
        }
    )
    checks = (_time_left(seen, pool, now, profile) for seen in observed.workloads if seen.name not in stopped)
    return Plan(
        status=status,
        launch=fleet.launch,
        stop=stops,
        drain=drain,
        requeue_after=earliest((fleet.requeue_after, leaving.requeue_after, *checks)),
    )


def _trouble(backend: BackendStatus) -> str:
    """Return the message of a backend, together with the URL that it is about."""
    return backend.message if backend.url in backend.message else f"{backend.url}: {backend.message}"


def _ready(ready: int, expected: int, troubles: list[str]) -> ConditionUpdate:
    if ready:
        return ConditionUpdate("Ready", True, "BackendsReady", f"{ready} of {expected} backends are ready")
    if not expected:
        return ConditionUpdate("Ready", False, "NoBackends", "the pool has replicas 0")
    return ConditionUpdate(
        "Ready", False, "NoBackendReady", "; ".join(troubles) or "the backends are starting"
    )


def _progressing(
    pool: BackendPool,
    observed: ObservedPool,
    fleet: WorkloadPlan,
    drain: frozenset[str],
    ready: int,
    expected: int,
) -> ConditionUpdate:
    if drain:
        names = ", ".join(sorted(drain))
        return ConditionUpdate(
            "Progressing", True, "Draining", f"{names}: no new rollouts, those it has may end"
        )
    if ready >= expected:
        return ConditionUpdate("Progressing", False, "Complete")
    text = f"{ready} of {expected} backends are ready"
    if fleet.waiting:
        text += f"; {'; '.join(fleet.waiting)}"
    starting = sorted(
        seen.name for seen in observed.workloads if seen.state == "starting" and not seen.pending
    )
    if starting and pool.spec.engine.type == "vllm":
        text += (
            f"; {', '.join(starting)}: vLLM loads the model, which takes from half a minute to many; "
            f"at most {pool.spec.engine.start_timeout_seconds} s (engine.startTimeoutSeconds)"
        )
    return ConditionUpdate("Progressing", True, "Starting", text)


def _degraded(fleet: WorkloadPlan, troubles: list[str]) -> ConditionUpdate:
    if not troubles:
        return ConditionUpdate("Degraded", False, "Healthy")
    reason = "CrashLoopBackOff" if fleet.crash_looping else "BackendsFailing"
    return ConditionUpdate("Degraded", True, reason, "; ".join(troubles))
