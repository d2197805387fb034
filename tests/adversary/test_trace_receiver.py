"""A receiver of traces that is slow or hostile, and hostile texts on their way to it."""

from __future__ import annotations

import resource
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rollyard_api.app import build
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_crds import RolloutJob
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Task
from rollyard_operator.pods.template_check import job_violations
from rollyard_pipeline.agents.base import AgentContext
from rollyard_pipeline.tool_parsers.base import ParsedCall
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_process.telemetry.export import MAX_TEXT, SpanExport
from rollyard_process.telemetry.identity import root_span_id, span_id, trace_id
from rollyard_process.telemetry.options import TraceOptions
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_process.telemetry.spans import TraceSpan
from rollyard_testing.adversary.restplane import Yard
from rollyard_testing.manifests import job_manifest
from rollyard_testing.operator.operatorlab import settings_in
from rollyard_testing.pace import patience
from rollyard_testing.traces.kept import Kept
from rollyard_testing.traces.receiver import receiving

pytestmark = pytest.mark.attack(boundary="control plane")


HOSTILE = (
    "x" * (1 << 20),
    "bash\n2030-01-01 all is well",
    "\x1b[2J\x1b]0;title\x07",
    "\u202eevil",
    "\ud800",
    "\x00" * 4096,
)
SPANS = 3000
MEGABYTE = 1 << 20


def _span(number: int) -> TraceSpan:
    rollout, now = f"job-0-{number}-0", time.time()
    return TraceSpan(
        trace_id(rollout), span_id(str(number)), root_span_id(rollout), "chat tiny", now - 1, now
    )


@pytest.mark.attack(
    "a receiver hangs, drips, redirects, or answers garbage or 10 GB, so that rollouts wait or memory fills",
    surface="traces",
    stopped_by="spans wait in a bounded queue for a thread of their own, and what finds no place is "
    "dropped and counted (`rollyard_spans_dropped_total`); 4 KiB of an answer are read, and redirects are "
    "not followed",
)
@pytest.mark.parametrize("receiver", ["hangs", "drips", "garbage", "endless", "redirects", "refuses"])
def test_no_receiver_holds_up_or_fills_a_process(receiver: str) -> None:
    """It hangs, sends a byte now and then, answers garbage or 10 GB, or leads elsewhere."""
    # What imports take is not the receiver's doing.
    SpanExport(TraceOptions("http://127.0.0.1:1/v1/traces"), "s", "i").close(5.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with receiving(receiver) as running:
        export = SpanExport(TraceOptions(f"{running.url}/v1/traces"), "s", "i", delay=0.01, queue=1000)
        began = time.monotonic()
        for number in range(SPANS):
            export.add(_span(number))
        # Waiting for a place in the queue would take minutes, as the receiver takes nothing.
        assert time.monotonic() - began < 30.0, "a span is taken or dropped at once"
        assert export.waiting <= 1000
        end = time.monotonic() + patience(30.0)
        while running.requests == 0 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)  # Nothing tells when a receiver that never ends has sent all that is read of it.
        began = time.monotonic()
        export.close(1.0)
        assert time.monotonic() - began < patience(15.0)
        assert export.exported == 0
        assert sum(export.dropped.values()) + export.waiting == SPANS
        assert running.spans == [], "nothing was sent to where a redirect leads"
        # What lies in buffers of sockets was sent, but no part of it is kept.
        assert running.sent_bytes < 64 * MEGABYTE
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 128 * 1024, f"{grown} KiB"


CONTENT_OF_SPANS = pytest.mark.attack(
    "what a policy writes, such as the name of a tool that does not exist, leaves the installation, or "
    "floods the receiver",
    surface="traces (off by default)",
    stopped_by="spans hold no content: no messages, arguments or outputs; only names of installed tools; "
    "texts of at most 256 characters with controls escaped",
)


@CONTENT_OF_SPANS
@pytest.mark.parametrize("name", HOSTILE)
async def test_no_word_of_a_policy_is_part_of_a_span(name: str) -> None:
    """The policy calls tools that do not exist, with arguments and names of its choice."""
    sink = Kept()
    context = AgentContext(
        task=Task(id="t", prompt="p"),
        spec=AgentSpec(),
        sampling=SamplingSpec(),
        episode=Episode(messages=[]),
        tools={},
        tool_context=ToolContext(client=None, timeout=1.0, max_output_bytes=1024),
        parser=HermesParser(),
        session=None,
    )
    with entered(RolloutScope("default", "job", "job-0-0-0", "run", 1, 0, sink)):
        result = await context.call(ParsedCall(name, {"secret": name}))
        await context.call(ParsedCall("", error=f"malformed: {name}"))
    assert result.error is not None
    assert [span.name for span in sink.spans] == ["execute_tool unknown"] * 2
    for span in sink.spans:
        values = [str(value) for value in span.attributes.values()]
        assert values == ["execute_tool", "job-0-0-0", "unknown", "ToolError"]


@CONTENT_OF_SPANS
@pytest.mark.parametrize("reason", ["Bad\nforged", "\x1b[2J", "\u202e" * 128, "x" * 128])
async def test_no_reason_of_a_worker_breaks_or_floods_a_trace(tmp_path: Path, reason: str) -> None:
    """A worker's token is that of one job, and it may say anything as its reason."""
    with receiving() as running:
        settings = Settings(state_dir=tmp_path, traces=TraceOptions(f"{running.url}/v1/traces"))
        app = build(settings)
        async with app.router.lifespan_context(app), AsyncExitStack() as stack:
            plane: ControlPlane = app.state.plane
            yard = Yard(app, plane, stack)
            await yard.submit("mine")
            http = yard.client(yard.job_token("mine"))
            (lease,) = await yard.lease(http, "mine", init=1)
            failure = {k: lease[k] for k in ("rollout", "token", "stage")}
            failure |= {"reason": reason, "retryable": False}
            body = {"worker": "w", "failures": [failure]}
            assert (await http.post("/v1/leases/fail", json=body)).status_code == 200
            assert plane.traces is not None
            plane.traces.close(30.0)
            assert plane.traces.dropped == {}
    assert sorted(span.name for span in running.spans) == ["init", "invoke_agent mine", "queue init"]
    for span in running.spans:
        for value in span.attributes.values():
            assert len(str(value)) <= MAX_TEXT
            assert not any(ord(c) < 32 or c == "\u202e" for c in str(value))


@pytest.mark.attack(
    "an author of a job sends the spans of workers to a server of their own",
    surface="traces",
    stopped_by="only flags and variables of the installation name the receiver; templates may not set "
    "`OTEL_…`, and no sandbox reaches the receiver's host",
)
@pytest.mark.parametrize(
    "name",
    [
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "ROLLYARD_OTLP_ENDPOINT",
        "ROLLYARD_TRACE_SAMPLE",
        "ROLLYARD_LOG_FORMAT",
    ],
)
def test_no_job_chooses_the_receiver(name: str, tmp_path: Path) -> None:
    """A template of a job is refused if it sets a variable that decides where the spans of workers go."""
    job = RolloutJob.model_validate(
        job_manifest(
            "job",
            {
                "tasks": {"inline": [{"id": "t", "prompt": "p"}]},
                "handler": "shell",
                "agent": {"type": "oracle"},
                "stages": {"run": {"template": {"env": [{"name": name, "value": "http://attacker"}]}}},
            },
            namespace="team",
        )
    )
    (found,) = job_violations(job, settings_in(tmp_path))
    assert "spec.stages.run.template.env[0]" in found
