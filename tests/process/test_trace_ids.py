"""Ids of traces and spans, sampling by group, and the options of traces and logs."""

from __future__ import annotations

import re

import pytest
from rollyard_process.telemetry import identity
from rollyard_process.telemetry.options import TraceOptions, log_form, trace_options
from rollyard_process.telemetry.scope import RolloutScope, current, entered, outside
from rollyard_process.telemetry.variables import TraceOptionError, trace_variables
from rollyard_testing.traces.kept import Kept

ROLLOUT = "quickstart-0a1b2c3d-7-3"


def test_the_ids_of_a_rollout_never_change() -> None:
    """Links to traces are made of a rollout's id alone, so other ids would break all of them."""
    assert identity.trace_id(ROLLOUT) == "a31cb8d8f4be5aa4173814af61618902"
    assert identity.root_span_id(ROLLOUT) == "695f8d84ec60c489"
    assert identity.stage_span_id(ROLLOUT, "run", 2) == "eeee23364c3b44ce"


def test_ids_have_the_form_of_trace_context_and_differ() -> None:
    spans = {
        identity.root_span_id(ROLLOUT),
        *(identity.stage_span_id(ROLLOUT, stage, token) for stage in ("init", "run") for token in (1, 2)),
        *(identity.queue_span_id(ROLLOUT, "run", since) for since in (1.0, 1.5)),
    }
    assert len(spans) == 7
    assert all(re.fullmatch(r"[0-9a-f]{16}", one) for one in spans)
    header = identity.traceparent(identity.trace_id(ROLLOUT), identity.root_span_id(ROLLOUT), True)
    for one in (header, identity.NOT_SAMPLED):
        # https://www.w3.org/TR/trace-context/#traceparent-header-field-values
        match = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[01]", one)
        assert match is not None
        assert int(match[1], 16)
        assert int(match[2], 16)
    assert header.endswith("-01")
    assert identity.NOT_SAMPLED.endswith("-00")


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_groups_are_sampled_as_a_whole(fraction: float) -> None:
    chosen = 0
    for group in range(2000):
        decisions = {identity.is_sampled(f"job-0a1b2c3d-{group}-{n}", fraction) for n in range(3)}
        assert len(decisions) == 1
        chosen += decisions.pop()
    assert chosen == pytest.approx(2000 * fraction, abs=80)


def test_a_smaller_fraction_keeps_a_part_of_the_same_groups() -> None:
    ids = [f"job-0a1b2c3d-{group}-0" for group in range(500)]
    few = {one for one in ids if identity.is_sampled(one, 0.1)}
    assert few < {one for one in ids if identity.is_sampled(one, 0.3)}


@pytest.mark.parametrize(
    ("flag", "sample", "environ", "url", "fraction"),
    [
        ("", "", {}, "", 1.0),
        ("http://c:4318", "0.5", {}, "http://c:4318/v1/traces", 0.5),
        ("http://c:4318/", "", {"ROLLYARD_TRACE_SAMPLE": "0.25"}, "http://c:4318/v1/traces", 0.25),
        ("", "", {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c/otlp/"}, "https://c/otlp/v1/traces", 1.0),
        ("", "", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/t"}, "https://c/t", 1.0),
        ("http://a", "", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/t"}, "http://a/v1/traces", 1.0),
        ("", "", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, "", 1.0),
        ("", "", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, "", 1.0),
    ],
)  # fmt: skip
def test_flags_come_before_variables(
    flag: str, sample: str, environ: dict[str, str], url: str, fraction: float
) -> None:
    assert trace_options(flag, sample, environ) == TraceOptions(url, fraction)


@pytest.mark.parametrize(
    ("flag", "sample", "environ", "named"),
    [
        ("localhost:4318", "", {}, "--otlp-endpoint must be a URL"),
        ("http://user:secret@c", "", {}, "--otlp-endpoint must be a URL"),
        ("http://c\nX: y", "", {}, "--otlp-endpoint must be a URL"),
        ("http://c/" + "x" * 3000, "", {}, "--otlp-endpoint must be a URL"),
        ("http://c", "1.5", {}, "--trace-sample must be a number from 0 to 1"),
        ("http://c", "nan", {}, "--trace-sample must be a number from 0 to 1"),
        ("", "", {"ROLLYARD_TRACE_SAMPLE": "all"}, "ROLLYARD_TRACE_SAMPLE must be a number"),
        ("", "", {"OTEL_EXPORTER_OTLP_ENDPOINT": "grpc://c"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be a URL"),
    ],
)
def test_a_wrong_option_is_named(flag: str, sample: str, environ: dict[str, str], named: str) -> None:
    with pytest.raises(TraceOptionError, match=named):
        trace_options(flag, sample, environ)


def test_the_form_of_logs() -> None:
    assert log_form(None, {}) == "text"
    assert log_form("json", {"ROLLYARD_LOG_FORMAT": "text"}) == "json"
    assert log_form(None, {"ROLLYARD_LOG_FORMAT": "json"}) == "json"
    with pytest.raises(TraceOptionError, match="ROLLYARD_LOG_FORMAT must be text or json"):
        log_form(None, {"ROLLYARD_LOG_FORMAT": "xml"})


def test_a_driver_passes_its_options_on_by_variables() -> None:
    found = trace_variables("http://c:4318", 0.5, "json")
    assert not [name for name in found if name.startswith("OTEL_")], "vLLM servers would take them as theirs"
    inherited = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://d/traces"}
    assert trace_options("", "", {**inherited, **found}).url == "http://c:4318/v1/traces"
    assert trace_options("", "", found) == trace_options("http://c:4318", "0.5", {})
    assert log_form(None, found) == "json"
    assert trace_variables("", None, None) == {}


def test_the_children_of_a_stage_have_ids_of_their_own() -> None:
    def scope(token: int, sink: Kept | None) -> RolloutScope:
        return RolloutScope("default", "job", ROLLOUT, "run", token, 0, sink)

    sink = Kept()
    for token in (1, 2):
        one = scope(token, sink)
        for _ in range(3):
            one.add("execute_tool bash", 0.5, {})
    assert len({span.id for span in sink.spans}) == 6
    assert {span.parent for span in sink.spans} == {
        identity.stage_span_id(ROLLOUT, "run", token) for token in (1, 2)
    }
    assert all(span.end - span.start == pytest.approx(0.5) for span in sink.spans)
    assert scope(1, sink).traceparent("0" * 15 + "1").endswith("-01")
    assert scope(1, None).traceparent("0" * 15 + "1").endswith("-00")


def test_a_task_that_outlives_a_rollout_does_not_inherit_it() -> None:
    scope = RolloutScope("default", "job", ROLLOUT, "run", 1, 0)
    with entered(scope):
        assert current() is scope
        assert outside().run(current) is None
    assert current() is None
