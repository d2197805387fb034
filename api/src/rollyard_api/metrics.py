"""Prometheus counters, which are fed after each commit, and gauges, which are read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from rollyard_process.telemetry.export import DROP_REASONS, SpanExport
from sqlalchemy.engine import Connection

from rollyard_api.backends import pools
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.schema import claims, jobs, rollouts

_SECONDS: Final = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LATENCY: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_REWARDS: Final = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "leases_granted": ("Leases granted", ("stage",)),
    "leases_expired": ("Leases that ran out", ("stage",)),
    "stage_failures": ("Stage failures reported by workers", ("stage", "reason")),
    "rollouts_ended": ("Rollouts ended", ("namespace", "job", "status", "reason")),
    "template_breaks": ("Segments begun because a chat template rewrote history", ()),
    "gateway_calls": ("Calls of harnesses for a reply of the model", ("protocol",)),
    "gateway_refused": ("Calls of harnesses that got an error", ()),
    "gateway_repeats": ("Calls of harnesses that repeated an earlier one, and got its reply", ()),
    "gateway_conversations": ("Conversations of harnesses", ("kind",)),
    "gateway_segments": ("Segments opened after the first one of a conversation of a harness", ()),
    "gateway_unmatched": ("Histories of harnesses that were not those that the gateway had seen", ()),
    "gateway_tokenized": ("Tokens of prompts of harnesses that were tokenized", ()),
    "sampled_tokens": ("Tokens sampled in completed Runs", ()),
    "reroutes": ("Rollouts moved to another backend", ()),
    "circuits_opened": ("Circuits of backends opened after failures in a row", ("namespace", "pool")),
    "weight_updates": ("Weight updates that have ended", ("state",)),
    "stale_rollouts": ("Rollouts restarted or cancelled because the weights had changed", ("action",)),
    "claim_failures": ("Sandbox claims that a driver failed", ("reason",)),
    "trajectories_stored": ("Records in the trajectory store", ()),
}
"""The help text of each counter, by its name in transactions and in the exposition, and its labels."""
_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "queue_seconds": ("Time in a stage's queue", ("stage",), _SECONDS),
    "stage_seconds": ("Time in a worker's hands", ("stage",), _SECONDS),
    "weight_update_paused_seconds": ("From pause to resume of one backend in a weight update", (), _SECONDS),
    "claim_seconds": ("From filing a sandbox claim to its sandbox", (), _SECONDS),
    "reward": ("Rewards", ("namespace", "job"), _REWARDS),
    "http_request_seconds": ("HTTP latency, long polls included", ("method", "route", "status"), _LATENCY),
}
"""The same for each histogram, with the bounds of its buckets."""


class _Collector:
    """Measurements that a function returns at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def _spans(traces: SpanExport) -> Iterator[Metric]:
    """Yield the counters of the spans of this process."""
    exported = CounterMetricFamily("rollyard_spans_exported", "Spans that the receiver of traces took")
    exported.add_metric([], traces.exported)
    yield exported
    dropped = CounterMetricFamily(
        "rollyard_spans_dropped", "Spans that were dropped, as no receiver took them", labels=["reason"]
    )
    counts = dict.fromkeys(DROP_REASONS, 0) | traces.dropped
    for reason, count in sorted(counts.items()):
        dropped.add_metric([reason], count)
    yield dropped


class Metrics:
    """All metrics of one control plane, in a registry of their own.

    Args:
        traces: The export of spans, or None if nothing is traced.
    """

    def __init__(self, traces: SpanExport | None = None) -> None:
        self.registry = CollectorRegistry()
        if traces is not None:
            self.registry.register(_Collector(partial(_spans, traces)))
        self._counters = {
            name: Counter(f"rollyard_{name}", text, labels, registry=self.registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"rollyard_{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, (text, labels, buckets) in _HISTOGRAMS.items()
        }
        self.http = self._histograms["http_request_seconds"]

    def add(self, counted: Iterable[tuple[str, tuple[str, ...], float]]) -> None:
        """Add the values that transactions have counted."""
        for name, labels, value in counted:
            if (counter := self._counters.get(name)) is not None:
                (counter.labels(*labels) if labels else counter).inc(value)
            else:
                histogram = self._histograms[name]
                (histogram.labels(*labels) if labels else histogram).observe(value)

    def render(self, conn: Connection) -> bytes:
        """Return the exposition text. This blocks, so call it in a reader."""
        scrape = CollectorRegistry()
        scrape.register(_Collector(partial(_gauges, conn)))
        return generate_latest(self.registry) + generate_latest(scrape)


def _gauges(conn: Connection) -> list[GaugeMetricFamily]:
    by_state = GaugeMetricFamily(
        "rollyard_rollouts", "Unfinished rollouts", labels=["namespace", "job", "stage", "status"]
    )
    query = (
        sa.select(jobs.c.namespace, jobs.c.name, rollouts.c.state, sa.func.count().label("n"))
        .join_from(rollouts, jobs, jobs.c.id == rollouts.c.job_id)
        .where(jobs.c.finished_at.is_(None), rollouts.c.state < RolloutState.SUCCEEDED)
        .group_by(jobs.c.namespace, jobs.c.name, rollouts.c.state)
    )
    for row in conn.execute(query):
        labels = [row.namespace, row.name, row.state.stage or "", row.state.status]
        by_state.add_metric(labels, row.n)
    unstored = GaugeMetricFamily(
        "rollyard_trajectories_unstored", "Ended rollouts not yet in the trajectory store"
    )
    pending = sa.select(sa.func.count()).select_from(rollouts).where(rollouts.c.pending.is_not(None))
    unstored.add_metric([], conn.execute(pending).scalar_one())
    return [by_state, unstored, _of_claims(conn), *_of_backends(conn)]


def _of_claims(conn: Connection) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily("rollyard_claims", "Sandbox claims", labels=["namespace", "state"])
    query = sa.select(claims.c.namespace, claims.c.state, sa.func.count().label("n"))
    for row in conn.execute(query.group_by(claims.c.namespace, claims.c.state)):
        gauge.add_metric([row.namespace, row.state], row.n)
    return gauge


_BACKEND: Final = (
    ("ready", "ready", "Whether a backend is ready"),
    ("active_rollouts", "activeRollouts", "Rollouts in Run on a backend"),
    ("max_active_rollouts", "maxActiveRollouts", "The most rollouts in Run on a backend"),
    ("draining", "draining", "Whether a backend takes no further rollouts and ends when it has none"),
    ("running_requests", "runningRequests", "Requests that a backend computes, as its metrics say"),
    ("waiting_requests", "waitingRequests", "Requests that wait in a backend, as its metrics say"),
    ("prefix_cache_hit_ratio", "prefixCacheHitRate", "Share of prompt tokens found in the prefix cache"),
    ("tokens_per_second", "tokensPerSecond", "Sampled tokens per second of one rollout's model time"),
)
"""The name of each gauge of a backend, its field of BackendStatus, and its help text."""


def _of_backends(conn: Connection) -> list[GaugeMetricFamily]:
    labels = ["namespace", "pool", "backend"]
    gauges = {
        field: GaugeMetricFamily(f"rollyard_backend_{name}", text, labels=labels)
        for name, field, text in _BACKEND
    }
    closed = GaugeMetricFamily("rollyard_backend_circuit_closed", "0: not used after failures", labels=labels)
    current = GaugeMetricFamily(
        "rollyard_backend_weights_current", "Whether a backend has the pool's weights", labels=labels
    )
    for pool in pools.listed(conn, None):
        meta: dict[str, Any] = pool["metadata"]
        for backend in pool["status"]["backends"]:
            values = [meta["namespace"], meta["name"], backend["url"]]
            for field, gauge in gauges.items():
                if field in backend:
                    gauge.add_metric(values, float(backend[field]))
            closed.add_metric(values, float(backend["circuit"] == "Closed"))
            current.add_metric(values, float(backend["weights"] == "Current"))
    return [*gauges.values(), closed, current]
