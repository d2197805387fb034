"""Every figure that the benchmark names: its unit, its goal, and how its ratio is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollyard_bench.results import NOT_MEASURED, Entry, Goal, Measurement


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the table in bench/README.md."""

    name: str
    group: str
    unit: str
    goal: Goal
    ratio: Literal["times faster", "times the baseline"] = "times the baseline"
    """`times faster` is baseline / value, and `times the baseline` is value / baseline."""


def _value(op: Literal["<=", ">="], limit: float, what: str) -> Goal:
    return Goal("value", op, limit, what)


def _ratio(op: Literal["<=", ">="], limit: float, what: str) -> Goal:
    return Goal("ratio", op, limit, what)


FIGURES: tuple[Figure, ...] = (
    Figure("echo_p50", "echo", "ms", _value("<=", 0.6, "≤ 0.6 ms")),
    Figure("echo_vs_tmux_at_once", "echo", "ms", _ratio(">=", 10, "≥ 10× faster"), "times faster"),
    Figure("echo_vs_tmux_after_sleep", "echo", "ms", _ratio(">=", 150, "≥ 150× faster"), "times faster"),
    Figure("seq_20000", "echo", "ms", _ratio("<=", 1.5, "≤ 1.5× a raw pty")),
    Figure("swe_action_time", "swe_action_time", "s", _ratio("<=", 0.6, "≤ 0.6× tmux")),
    Figure("ipython_p50", "ipython", "ms", _value("<=", 5, "≤ 5 ms"), "times faster"),
    Figure("sandbox_cold", "start", "ms", _ratio("<=", 1.5, "≤ 1.5× bare")),
    Figure("init_rate", "init_rate", "/s", _ratio(">=", 2, "≥ 2× before")),
    Figure("own_cpu_per_rollout", "own_cpu", "ms", _value("<=", 40, "≤ 40 ms")),
    Figure("humaneval_evals", "humaneval_evals", "ms", _ratio("<=", 1.3, "≤ 1.3× a fresh process")),
    Figure("apptainer_cold", "apptainer", "ms", _ratio("<=", 1.2, "≤ 1.2× bare instance + server")),
    Figure("slurm_first_rollout", "slurm_start", "ms", _ratio("<=", 1.6, "≤ 1.6× bare sbatch + instance")),
    Figure("lease_cycles", "leases", "/s", _value(">=", 1000, "≥ 1,000/s")),
    Figure("queued_10000_resident", "memory", "MB", _value("<=", 300, "≤ 300 MB")),
    Figure("pipeline_makespan", "pipeline", "s", _ratio("<=", 1.05, "≤ 1.05× the bound")),
    Figure("dapo_to_target", "dapo_to_target", "s", _ratio(">=", 1.5, "≥ 1.5× faster"), "times faster"),
    Figure("delta_tokenize_32k", "tokenize", "ms", _value("<=", 2, "≤ 2 ms"), "times faster"),
    Figure("prefix_hits", "prefix", "%", _value(">=", 76, "≥ 76%")),
    Figure("turn_overhead", "overhead", "ms", _ratio("<=", 6.5, "≤ 6.5× a bare round trip")),
    Figure("gateway_call", "gateway", "ms", _value("<=", 3, "≤ 3 ms")),
    Figure("gateway_first_event", "gateway", "ms", _value("<=", 5, "≤ 5 ms")),
    Figure("gateway_history", "gateway", "ms", _ratio("<=", 2, "≤ 2× at 2,000 tokens")),
    Figure("gateway_cpu", "gateway", "ms", _value("<=", 5, "≤ 5 ms")),
    Figure("gateway_memory", "gateway", "MB", _value("<=", 2, "≤ 2 MB")),
    Figure("uneven_makespan", "uneven", "s", _ratio("<=", 1.15, "≤ 1.15× the ideal")),
    Figure("submit_to_first_token", "first_token", "ms", _value("<=", 500, "≤ 500 ms"), "times faster"),
    Figure("fire_every_4_s", "fire_throughput", "rollouts/s", _ratio(">=", 0.5, "≥ 0.5× quiet")),
    Figure("fire_every_2_s", "fire_throughput", "rollouts/s", _ratio(">=", 0.33, "≥ 0.33× quiet")),
    Figure("delivery_rate", "delivery", "MB/s", _value(">=", 200, "≥ 200 MB/s")),
    Figure("step_overhead", "step_overhead", "s", _ratio("<=", 1.25, "≤ 1.25× an in-process loop")),
    Figure("step_overlap", "step_overlap", "s", _ratio(">=", 1.3, "≥ 1.3× faster"), "times faster"),
    Figure("page_first_view", "page", "s", _value("<=", 1, "≤ 1 s")),
    Figure("page_filter", "page", "ms", _value("<=", 300, "≤ 300 ms")),
    Figure("page_trajectory", "page", "s", _value("<=", 1, "≤ 1 s")),
    Figure("page_server_cost", "page", "%", _value("<=", 5, "≤ 5% of a core")),
    Figure("job_to_first_pod", "kubernetes", "ms", _value("<=", 300, "≤ 300 ms")),
    Figure("sandbox_pod_cold", "kubernetes", "ms", _ratio("<=", 1.0, "≤ 1.2× bare pod + server")),
    Figure("reconcile_lag_p99", "kubernetes_fleet", "s", _value("<=", 2, "≤ 2 s")),
)

GROUPS: tuple[str, ...] = tuple(dict.fromkeys(figure.group for figure in FIGURES))


def selected(names: list[str]) -> list[str]:
    """Return the groups for these names of groups or figures, in the registry's order; all for no names.

    Raises:
        ValueError: A name is neither; the text lists the names that exist.
    """
    known = {figure.name: figure.group for figure in FIGURES} | {group: group for group in GROUPS}
    unknown = [name for name in names if name not in known]
    if unknown:
        figures = ", ".join(figure.name for figure in FIGURES)
        raise ValueError(
            f"--only: unknown: {', '.join(unknown)}; there are the groups {', '.join(GROUPS)} "
            f"and the figures {figures}"
        )
    chosen = {known[name] for name in names} or set(GROUPS)
    return [group for group in GROUPS if group in chosen]


def judge(figure: Figure, measured: Measurement) -> Entry:
    """Return the result line of what a group gave for a figure."""
    if measured.value is None:
        return missing(figure, measured.how)
    ratio: float | None = None
    if measured.baseline is not None:
        ratio = measured.value / measured.baseline.value
        if figure.ratio == "times faster":
            ratio = 1 / ratio
    return Entry(
        name=figure.name,
        value=measured.value,
        unit=figure.unit,
        baseline=measured.baseline,
        ratio=ratio,
        goal=figure.goal.what,
        met=figure.goal.met(measured.value, ratio),
        how=measured.how,
    )


def _without_value(figure: Figure, met: bool | None, how: str) -> Entry:
    return Entry(figure.name, None, figure.unit, None, None, figure.goal.what, met, how)


def missing(figure: Figure, reason: str) -> Entry:
    """Return the result line of a figure that needs something which is not on this machine."""
    return _without_value(figure, None, NOT_MEASURED + reason)


def failed(figure: Figure, error: str) -> Entry:
    """Return the result line of a figure whose measurement went wrong. It counts as missed."""
    return _without_value(figure, False, f"failed: {error}")
