"""The export of spans: what a receiver gets, what is dropped, and what is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from rollyard_process.telemetry import export as exports
from rollyard_process.telemetry.export import SpanExport, exporting, text
from rollyard_process.telemetry.identity import root_span_id, span_id, trace_id
from rollyard_process.telemetry.options import TraceOptions
from rollyard_process.telemetry.spans import TraceSpan, Value
from rollyard_process.telemetry.variables import TraceOptionError
from rollyard_testing.pace import patience
from rollyard_testing.traces.receiver import receiving


def span(number: int, **attributes: Value) -> TraceSpan:
    rollout = f"job-0-{number}-0"
    now = time.time()
    return TraceSpan(
        trace_id(rollout),
        span_id(str(number)),
        root_span_id(rollout),
        "chat tiny",
        now - 1.5,
        now,
        attributes,
    )


def options(url: str) -> TraceOptions:
    return TraceOptions(f"{url}/v1/traces")


def test_a_receiver_gets_what_was_added() -> None:
    with receiving() as receiver:
        export = SpanExport(options(receiver.url), "rollyard-worker", "w-1")
        one = span(1, a="text", b=2, c=0.5, d=True, e=("stop",))
        export.add(one)
        export.close(30.0)
        (got,) = receiver.spans
    assert (got.trace, got.id, got.parent, got.name) == (one.trace, one.id, one.parent, one.name)
    assert got.attributes == {"a": "text", "b": 2, "c": 0.5, "d": True, "e": ["stop"]}
    assert got.service == "rollyard-worker"
    assert got.seconds == pytest.approx(1.5, abs=1e-3)
    assert (export.exported, export.dropped, export.waiting) == (1, {}, 0)


def test_spans_leave_without_an_end_of_the_process() -> None:
    with receiving() as receiver:
        export = SpanExport(options(receiver.url), "s", "i", delay=0.05)
        export.add(span(1))
        receiver.until(bool)
        export.add(span(2))
        receiver.until(lambda spans: len(spans) == 2)
        export.close()
        export.add(span(3))
        assert export.dropped == {"closed": 1}


def test_a_full_queue_drops_and_counts() -> None:
    with receiving("hangs") as receiver:
        export = SpanExport(options(receiver.url), "s", "i", delay=0.01, queue=100)
        for number in range(1000):
            export.add(span(number))
        assert export.waiting <= 100
        assert export.dropped["queue_full"] >= 900
        began = time.monotonic()
        export.close(0.5)
        assert time.monotonic() - began < patience(10)


def test_variables_of_opentelemetry_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with receiving() as receiver:
        export = SpanExport(options(receiver.url), "s", "i")
        export.add(span(1))
        export.close(30.0)
        assert len(receiver.spans) == 1
        assert b"lab" in receiver.bodies[0]


@pytest.mark.parametrize("value", ["a\nb", "\x1b[2J", "\u202e", "\x00", "x" * (1 << 20), "\ud800"])
def test_texts_of_spans_are_short_and_without_control_characters(value: str) -> None:
    with receiving() as receiver:
        export = SpanExport(options(receiver.url), "s", "i")
        export.add(span(1, label=value))
        export.close(30.0)
        (got,) = receiver.spans
    label = str(got.attributes["label"])
    assert len(label) <= exports.MAX_TEXT
    assert label == text(value)
    assert not any(ord(c) < 32 or c == "\u202e" for c in label)


def test_missing_libraries_are_an_error_only_if_a_flag_asks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exports, "are_installed", lambda: False)
    with (
        pytest.raises(TraceOptionError, match=r"pip install 'rollyard\[traces\]'") as missing,
        exporting(options("http://127.0.0.1:1"), "s", "i", required=True),
    ):
        pass
    assert missing.value.reason == "TraceLibrariesMissing"
    with exporting(options("http://127.0.0.1:1"), "s", "i", required=False) as nothing:
        assert nothing is None
    assert "no traces are sent" in caplog.text


@pytest.mark.parametrize(
    ("program", "allowed"),
    # FastAPI itself imports OpenTelemetry's interfaces, which do nothing alone.
    [("rollyard_api.__main__", ("opentelemetry",)), ("rollyard_pipeline.__main__", ())],
)
def test_without_traces_no_library_of_traces_is_imported(program: str, allowed: tuple[str, ...]) -> None:
    code = f"import sys, {program}; from rollyard_process.telemetry import export, options; "
    code += "\nwith export.exporting(options.trace_options(), 's', 'i', required=False) as e:"
    code += "\n    assert e is None"
    code += (
        "\nroots = ('opentelemetry.sdk', 'opentelemetry.exporter', 'opentelemetry.proto', 'google.protobuf', "
    )
    code += "'requests', 'opentelemetry')"
    code += f"\nprint([name for name in roots if name in sys.modules and name not in {allowed}])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(120), env=environment
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
