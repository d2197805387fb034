"""The full description of one job or pool, for people to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import yaml
from rich.console import Console
from rich.text import Text
from rollyard_crds import BackendPool, BackendStatus, Condition, RolloutJob
from rollyard_crds.base import Model
from rollyard_crds.fields.dynamic_sampling import DynamicSamplingStatus
from rollyard_crds.fields.reward import rounded
from rollyard_crds.fields.signals import warnings_of
from rollyard_process.log_text import one_line, sentence

from rollyard.render.progress import stage_progress
from rollyard.render.tables import (
    BACKEND_COLUMNS,
    age,
    backend_row,
    fits,
    places_of,
    plain_table,
    print_table,
    trains_of,
    version_of,
)


def _when(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _field(console: Console, name: str, value: object) -> None:
    console.print(Text(f"{name + ':':<14}{value}"), soft_wrap=True)


def _conditions(console: Console, conditions: Iterable[Condition]) -> None:
    console.print("\nConditions:")
    table = plain_table(["type", "status", "reason", "age", "message"])
    now = datetime.now(UTC)
    for condition in conditions:
        since = age(condition.last_transition_time, now)
        table.add_row(condition.type, condition.status, condition.reason, since, condition.message)
    print_table(console, table)


def _spec(console: Console, spec: Model) -> None:
    """Print what a spec says beside the defaults; `rollyard get -o yaml` prints all of it."""
    shown = spec.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    inline = shown.get("tasks", {}).get("inline")
    if inline:
        shown["tasks"]["inline"] = f"{len(inline)} task{'s' * (len(inline) > 1)}"
    files = shown.get("agent", {}).get("files")
    if files:
        shown["agent"]["files"] = {name: f"{len(text):,} characters" for name, text in files.items()}
    console.print("\nSpec, without defaults:")
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
    console.print(Text("".join(f"  {line}" for line in text.splitlines(keepends=True))), soft_wrap=True)


def describe_job(
    console: Console,
    job: RolloutJob,
    failures: Counter[tuple[str, str]],
    attempts: Counter[tuple[str, str, bool]],
    link: str = "",
    pool: BackendPool | None = None,
) -> None:
    """Print a job's status, counts per stage, reasons of failures and retries, conditions and spec.

    Args:
        console: Where it is printed.
        job: The job.
        failures: The failed rollouts, counted by reason and message.
        attempts: The attempts that did not end well, counted by stage, reason and whether they counted.
        link: The link of the job's page, or "" if there is none.
        pool: The job's pool, from which limits follow that the job leaves open, or None if there is none.
    """
    status, counts = job.status, job.status.counts
    _field(console, "Name", job.metadata.name)
    _field(console, "Namespace", job.metadata.namespace)
    _field(console, "Phase", status.phase)
    _field(console, "Message", status.message or "-")
    for warning in warnings_of(job.spec):
        _field(console, "Warning", warning)
    for advice in status.advice:
        _field(console, "Advice", one_line(advice.message))
    _field(console, "Created", _when(job.metadata.creation_timestamp))
    _field(console, "Started", _when(status.start_time))
    _field(console, "Ended", _when(status.completion_time))
    _field(console, "Reward mean", "-" if status.reward_mean is None else rounded(status.reward_mean))
    ended = f"{counts.succeeded} with a reward, {counts.failed} failed, {counts.cancelled} cancelled"
    _field(console, "Rollouts", f"{counts.total} in all: {ended}")
    _limits(console, job, () if pool is None else pool.status.backends)
    if link:
        _field(console, "Page", link)
    if status.dynamic_sampling is not None:
        _dynamic_sampling(console, status.dynamic_sampling)
    if status.skipped_rows is not None:
        _field(console, "Skipped", "\n  ".join(map(one_line, status.skipped_rows.lines())))
    if status.plugins:
        versions = [f"{plugin.file} (sha256:{plugin.sha256[:12]})" for plugin in status.plugins]
        _field(console, "Plugins", ", ".join(versions))
    console.print()
    table = plain_table(["stage", "past it", "active", "queued"])
    for item in stage_progress(counts):
        table.add_row(item.stage, str(item.done), str(item.active), str(item.queued))
    print_table(console, table)
    if failures:
        console.print("\nFailures:")
        for (reason, message), count in failures.most_common(10):
            console.print(Text(f"  {count} × {sentence(f'{reason}: {message}')}"), soft_wrap=True)
    if attempts:
        console.print("\nAttempts that did not end well:")
        for (stage, reason, counted), count in attempts.most_common(10):
            note = "" if counted else ", not counted"
            console.print(Text(f"  {count} × {reason} in {stage}{note}"), soft_wrap=True)
    _conditions(console, status.conditions)
    _spec(console, job.spec)


def _limits(console: Console, job: RolloutJob, backends: Sequence[BackendStatus]) -> None:
    """Print the limits that are in force, which the job may leave to the servers of its pool."""
    agent, tokens = job.spec.agent, job.spec.sampling.max_tokens
    if job.spec.backend_ref is not None:
        reported = [backend.context_tokens for backend in backends if backend.context_tokens is not None]
        contexts = sorted({min(context, agent.max_context_tokens or context) for context in reported})
        if not contexts and agent.max_context_tokens is not None:
            contexts = [agent.max_context_tokens]
        _field(console, "Context", _tokens(contexts) or "that of the server, which is not known yet")
        _field(console, "Turn", "what is left of the context" if tokens is None else f"{tokens:,} tokens")
        smallest = contexts[0] if contexts else None
        _field(console, "Tool output", f"{agent.tool_output_bytes(smallest):,} bytes")
    places, own = places_of(backends), job.spec.places("run")
    run = f"up to {own if places is None else min(own, places):,} rollouts of each worker at once"
    _field(console, "Run", f"{run}, {job.spec.stages.run.timeout_seconds:,} s each")
    if not job.spec.needs_early_sandboxes:
        _field(console, "Sandboxes", "none in Init and Run")


def _tokens(contexts: Sequence[int]) -> str:
    """Return the contexts of a pool's backends, from the smallest to the largest, or "" if there are none."""
    if not contexts:
        return ""
    least, most = contexts[0], contexts[-1]
    return f"{most:,} tokens" if least == most else f"{least:,} to {most:,} tokens"


def _dynamic_sampling(console: Console, sampling: DynamicSamplingStatus) -> None:
    target = f"{sampling.informative_groups} of {sampling.target_groups} groups have a signal"
    pending = f"{sampling.in_flight_groups} in flight, {sampling.waiting_groups} waiting"
    _field(console, "Target", f"{target}; {pending}")
    parts = (
        (sampling.uninformative_groups, "groups without a signal"),
        (sampling.dropped_groups, "groups with too few rewards"),
        (sampling.surplus_groups, "surplus groups"),
        (sampling.surplus_rollouts, "surplus rollouts"),
        (sampling.discarded_tokens, "sampled tokens"),
    )
    _field(console, "Thrown away", ", ".join(f"{count} {label}" for count, label in parts if count) or "-")


def _backends(console: Console, backends: Iterable[BackendStatus]) -> None:
    """Print a table, or a few lines for each backend if a terminal is too narrow for the table."""
    table = plain_table(BACKEND_COLUMNS)
    table.padding = (0, 2, 0, 0)
    rows = [(backend_row(backend), backend.message) for backend in backends]
    for row, _ in rows:
        table.add_row(*row)
    if not console.is_terminal or fits(console, table):
        print_table(console, table)
        for row, message in rows:
            if message:
                console.print(Text(f"{row[0]}: {message}"), soft_wrap=True)
        return
    for row, message in rows:
        parts = [f"{name} {value}" for name, value in zip(BACKEND_COLUMNS[1:], row[1:], strict=True)]
        lines = [row[0], f"  {', '.join(parts[:4])}", f"  {', '.join(parts[4:])}"]
        console.print(Text("\n".join([*lines, *([f"  {message}"] if message else [])])), soft_wrap=True)


def _limit(pool: BackendPool) -> str:
    """Return the most active rollouts of a pool's backends, and what they follow from."""
    own = pool.spec.max_active_rollouts
    if own is not None:
        return f"{own} active rollouts for each backend"
    backends = pool.status.backends
    places = places_of(backends)
    if places is None:
        return "not known yet; as many rollouts as the KV cache of each backend has room for"
    silent = any(backend.kv_cache_tokens is None or backend.context_tokens is None for backend in backends)
    source = "some say nothing of their KV cache" if silent else "by the size of the KV caches"
    return f"{places} active rollouts on all backends together, {source}"


def describe_pool(console: Console, pool: BackendPool) -> None:
    """Print a pool's state, backends, conditions and spec."""
    _field(console, "Name", pool.metadata.name)
    _field(console, "Namespace", pool.metadata.namespace)
    engine = pool.spec.engine
    total = len(engine.external.urls) if engine.external else pool.spec.replicas
    paused = "; paused: the servers sample nothing" if pool.status.paused else ""
    _field(console, "Ready", f"{pool.status.ready_replicas} of {total} backends{paused}")
    _field(console, "Model", pool.spec.model)
    _field(console, "Engine", engine.type)
    _field(console, "Version", version_of(pool))
    _field(console, "Trains", trains_of(pool))
    _field(console, "Limit", _limit(pool))
    _field(console, "Created", _when(pool.metadata.creation_timestamp))
    console.print("\nBackends:")
    _backends(console, pool.status.backends)
    _conditions(console, pool.status.conditions)
    _spec(console, pool.spec)
