"""One job or pool in full, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime

import yaml
from rich.console import Console
from rich.text import Text
from rollyard_crds import BackendPool, Condition, RolloutJob

from rollyard.render.progress import stage_progress
from rollyard.render.tables import plain_table, print_table


def _when(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _field(console: Console, name: str, value: object) -> None:
    console.print(Text(f"{name + ':':<14}{value}"), soft_wrap=True)


def _conditions(console: Console, conditions: Iterable[Condition]) -> None:
    console.print("\nConditions:")
    table = plain_table(["type", "status", "reason", "since", "message"])
    for condition in conditions:
        since = condition.last_transition_time.strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(condition.type, condition.status, condition.reason, since, condition.message)
    print_table(console, table)


def _spec(console: Console, spec: object) -> None:
    console.print("\nSpec:")
    text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True)
    console.print(Text("".join(f"  {line}" for line in text.splitlines(keepends=True))), soft_wrap=True)


def describe_job(console: Console, job: RolloutJob, failures: Counter[tuple[str, str]]) -> None:
    """Status, counts per stage, conditions, reasons of failures (most frequent first), spec."""
    status, counts = job.status, job.status.counts
    _field(console, "Name", job.metadata.name)
    _field(console, "Namespace", job.metadata.namespace)
    _field(console, "Phase", status.phase)
    _field(console, "Message", status.message or "-")
    _field(console, "Created", _when(job.metadata.creation_timestamp))
    _field(console, "Started", _when(status.start_time))
    _field(console, "Ended", _when(status.completion_time))
    _field(console, "Reward mean", "-" if status.reward_mean is None else f"{status.reward_mean:.4f}")
    ended = f"{counts.succeeded} with a reward, {counts.failed} failed, {counts.cancelled} cancelled"
    _field(console, "Rollouts", f"{counts.total} in all: {ended}")
    console.print()
    table = plain_table(["stage", "past it", "active", "queued"])
    for item in stage_progress(counts):
        table.add_row(item.stage, str(item.done), str(item.active), str(item.queued))
    print_table(console, table)
    if failures:
        console.print("\nFailures:")
        for (reason, message), count in failures.most_common(10):
            console.print(Text(f"  {count} × {reason}: {message}"), soft_wrap=True)
    _conditions(console, status.conditions)
    spec = job.spec.to_json()
    inline = spec["tasks"].get("inline")
    if inline:
        spec["tasks"]["inline"] = f"{len(inline)} tasks"
    _spec(console, spec)


def describe_pool(console: Console, pool: BackendPool) -> None:
    """Backends, conditions, spec."""
    _field(console, "Name", pool.metadata.name)
    _field(console, "Namespace", pool.metadata.namespace)
    _field(console, "Ready", f"{pool.status.ready_replicas} of {len(pool.status.backends)} backends")
    console.print()
    table = plain_table(["backend", "ready", "active rollouts", "policy version", "message"])
    for backend in pool.status.backends:
        active = str(backend.active_rollouts)
        table.add_row(backend.url, str(backend.ready), active, backend.policy_version, backend.message)
    print_table(console, table)
    _conditions(console, pool.status.conditions)
    _spec(console, pool.spec.to_json())
