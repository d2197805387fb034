"""The ``/metrics`` call, which reports the scheduler's state under vLLM's metric names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollyard_engine.generation.thread import EngineThread

LABELS: Final = ("model_name", "engine")


class EngineCollector(Collector):
    """A collector that reads the engine's counters at each scrape."""

    def __init__(self, engine: EngineThread, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, "0")

    def collect(self) -> Iterable[Metric]:
        """Yield one metric family for each number."""
        scheduler = self._engine.scheduler
        stats = scheduler.stats
        gauges = (
            ("vllm:num_requests_running", "Requests that hold a slot.", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", self._engine.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the KV cache memory in use, 1 is all.",
                scheduler.cache_usage,
            ),
        )
        counters = (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.", stats.prefix_hits),
            ("vllm:generation_tokens", "Sampled tokens.", stats.generation_tokens),
        )
        for name, text, number in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, number)
            yield gauge
        for name, text, number in counters:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, number)
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Ended requests by how they ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, number in stats.finished_requests.items():
            ended.add_metric((*self._labels, reason), number)
        yield ended


def exposition(engine: EngineThread, model_name: str) -> bytes:
    """Return the metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return generate_latest(registry)
