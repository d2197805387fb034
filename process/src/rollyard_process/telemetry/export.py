"""The export of spans: OTLP over HTTP with protobuf, in batches, from a thread of its own.

OpenTelemetry is imported only when an export is opened. A receiver that is down, slow or hostile costs the
process nothing but this thread: a full queue drops spans and counts them, and at most MAX_ANSWER_BYTES of an
answer are read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from rollyard_process.log_text import one_line
from rollyard_process.telemetry.identity import is_sampled
from rollyard_process.telemetry.options import TraceOptions
from rollyard_process.telemetry.spans import TraceSpan, Value
from rollyard_process.telemetry.variables import TraceOptionError
from rollyard_process.version import installed_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

log = logging.getLogger(__name__)

MAX_QUEUE: Final = 8192
"""The largest number of spans that wait for their export. Further ones are dropped."""
BATCH: Final = 512
"""The largest number of spans in one request."""
DELAY_SECONDS: Final = 2.0
"""How long a span waits at most for others before it is sent, in seconds."""
CLOSE_SECONDS: Final = 1.5
"""How long the end of a process waits for the last spans, in seconds."""
MAX_ANSWER_BYTES: Final = 4096
"""The number of bytes of a receiver's answer that are read."""
MAX_TEXT: Final = 256
"""The largest number of characters in a name or an attribute of a span."""
DROP_REASONS: Final = ("closed", "not_taken", "queue_full")
"""Why a span is dropped: the process is ending, the receiver does not take it, or too many spans wait."""
_SELDOM_SECONDS: Final = 60.0
_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
_MODULES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "requests")


class SpanExport:
    """Exports the spans of one process.

    Args:
        options: The receiver and the fraction of groups that are traced.
        service: The attribute `service.name` of all spans, such as `rollyard-worker`.
        instance: The attribute `service.instance.id`, which no other process of the service has.
        delay: How long a span waits at most for others before it is sent, in seconds.
        queue: The largest number of spans that wait for their export.

    Raises:
        TraceOptionError: The extra `traces` is not installed.
    """

    def __init__(
        self,
        options: TraceOptions,
        service: str,
        instance: str,
        *,
        delay: float = DELAY_SECONDS,
        queue: int = MAX_QUEUE,
    ) -> None:
        if not are_installed():
            raise TraceOptionError(
                "traces need OpenTelemetry's libraries; install them with: pip install 'rollyard[traces]'",
                reason="TraceLibrariesMissing",
            )
        self.options = options
        self._queue = queue
        self._taken = 0
        self._done = 0
        self._exported = 0
        self._dropped: Counter[str] = Counter()
        self._closed = False
        self._convert = _Conversion(service, instance)
        self._processor = self._open(delay)

    def _open(self, delay: float) -> BatchSpanProcessor:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        export = self

        class Counted(SpanExporter):
            """Counts what the receiver took."""

            def __init__(self) -> None:
                self._inner: Any = OTLPSpanExporter(endpoint=export.options.url, session=_bounded_session())

            def export(self, spans: Any) -> SpanExportResult:
                taken = False
                try:
                    taken = self._inner.export(spans) is SpanExportResult.SUCCESS
                finally:
                    export._count(len(spans), taken)
                return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE

            def shutdown(self) -> None:
                self._inner.shutdown()

        for name in _LOGGERS:
            # A receiver that is down for hours must not cause a log line each second.
            logging.getLogger(name).addFilter(_Seldom())
        return BatchSpanProcessor(
            Counted(),
            # Spans that wait are counted here, so the processor's own queue is never full.
            max_queue_size=self._queue + BATCH,
            schedule_delay_millis=delay * 1e3,
            max_export_batch_size=min(BATCH, self._queue),
        )

    @property
    def exported(self) -> int:
        """The number of spans that the receiver has taken."""
        return self._exported

    @property
    def dropped(self) -> dict[str, int]:
        """The numbers of spans that were dropped, by reason; see DROP_REASONS."""
        return dict(self._dropped)

    @property
    def waiting(self) -> int:
        """The number of spans that wait for their export, or are in a request."""
        return self._taken - self._done

    def takes(self, rollout: str) -> bool:
        """Return whether the spans of a rollout are exported: see `identity.is_sampled`."""
        return is_sampled(rollout, self.options.sample)

    def add(self, span: TraceSpan) -> None:
        """Take a span, or drop it and count it. This neither blocks nor fails."""
        if self._closed:
            self._dropped["closed"] += 1
        elif self.waiting >= self._queue:
            self._dropped["queue_full"] += 1
        else:
            self._taken += 1
            self._processor.on_end(self._convert.span(span))

    def _count(self, spans: int, taken: bool) -> None:
        self._done += spans
        if taken:
            self._exported += spans
        else:
            self._dropped["not_taken"] += spans

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what waits, within this many seconds. Later spans are dropped."""
        if self._closed:
            return
        self._closed = True
        # The processor's own shutdown may wait for half a minute. Its threads do not keep a process alive.
        shut_down: Callable[[], None] = self._processor.shutdown
        thread = threading.Thread(target=shut_down, name="last spans", daemon=True)
        thread.start()
        thread.join(seconds)
        dropped = sum(self._dropped.values()) + self.waiting
        if dropped:
            log.warning("%d spans were exported and %d were dropped", self._exported, dropped)


class _Conversion:
    """Makes spans of OpenTelemetry's SDK."""

    def __init__(self, service: str, instance: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        version = installed_version()
        own = {"service.name": service, "service.instance.id": instance, "service.version": version}
        # The detectors of installed packages are not asked, because finding them takes long.
        self._resource = Resource(own).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("rollyard", version)
        self._sampled = TraceFlags(TraceFlags.SAMPLED)
        self._context, self._span = SpanContext, ReadableSpan
        self._client, self._internal = SpanKind.CLIENT, SpanKind.INTERNAL
        self._well = Status(StatusCode.UNSET)
        self._status, self._error = Status, StatusCode.ERROR

    def span(self, span: TraceSpan) -> ReadableSpan:
        trace = int(span.trace, 16)
        parent = None
        if span.parent:
            parent = self._context(trace, int(span.parent, 16), is_remote=False, trace_flags=self._sampled)
        return self._span(
            name=text(span.name),
            context=self._context(trace, int(span.id, 16), is_remote=False, trace_flags=self._sampled),
            parent=parent,
            resource=self._resource,
            attributes={name: _plain(value) for name, value in span.attributes.items()},
            kind=self._client if span.client else self._internal,
            status=self._status(self._error, text(span.error)) if span.error else self._well,
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=self._scope,
        )


def text(value: str) -> str:
    """Return a text from outside as spans may hold it: without control characters, and not too long."""
    # One lone surrogate would keep the whole request from being encoded.
    line = one_line(value[:MAX_TEXT])[:MAX_TEXT]
    return line.encode("utf-8", "replace").decode()


def _plain(value: Value) -> Value:
    if isinstance(value, str):
        return text(value)
    return tuple(text(part) for part in value) if isinstance(value, tuple) else value


class _Seldom(logging.Filter):
    """Passes one record a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SELDOM_SECONDS
        return True


def are_installed() -> bool:
    """Return whether OpenTelemetry's libraries are installed. None of them stays imported."""
    try:
        return all(find_spec(name) is not None for name in _MODULES)
    except ModuleNotFoundError:
        return False


def _bounded_session() -> Any:
    """Return a session of `requests` that reads MAX_ANSWER_BYTES of an answer at most."""
    import io

    import requests

    class BoundedSession(requests.Session):
        def request(self, *args: Any, **options: Any) -> requests.Response:
            answer = super().request(*args, **{**options, "stream": True})
            try:
                content = answer.raw.read(MAX_ANSWER_BYTES + 1, decode_content=False) or b""
                if len(content) > MAX_ANSWER_BYTES:
                    # The rest is not wanted, so the connection cannot be used again.
                    answer.raw.close()
                else:
                    answer.raw.release_conn()
            except BaseException:
                answer.close()
                raise
            answer.raw = io.BytesIO(content[:MAX_ANSWER_BYTES])
            if 300 <= answer.status_code < 400:
                # The exporter does not follow a redirect, and would take it for a success.
                raise requests.exceptions.TooManyRedirects(f"the receiver answered {answer.status_code}")
            return answer

    return BoundedSession()


@contextlib.contextmanager
def exporting(
    options: TraceOptions, service: str, instance: str, *, required: bool
) -> Iterator[SpanExport | None]:
    """Yield an open export, or None if nothing is to be traced.

    Args:
        options: The receiver and the fraction of groups that are traced.
        service: The name of the service.
        instance: The name of the process.
        required: Whether a flag asks for traces, and not just a variable that may be meant for other
            programs.

    Raises:
        TraceOptionError: The extra `traces` is not installed, and a flag asks for traces.
    """
    export = None
    if options.on:
        try:
            export = SpanExport(options, service, instance)
        except TraceOptionError as error:
            if required:
                raise
            log.warning("no traces are sent to %s: %s", options.url, error)
    try:
        yield export
    finally:
        if export is not None:
            export.close()
