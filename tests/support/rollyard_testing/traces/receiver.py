"""A receiver of OTLP over HTTP, which keeps the spans that it gets, or behaves badly."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollyard_testing.pace import patience

Value = str | int | float | bool | list[Any] | None
MISBEHAVIOURS = ("none", "hangs", "drips", "garbage", "endless", "redirects", "refuses")


@dataclass(frozen=True, slots=True)
class GotSpan:
    """A span as the receiver got it."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start: float
    end: float
    attributes: Mapping[str, Value]
    failed: bool

    @property
    def seconds(self) -> float:
        """Return how long it took."""
        return self.end - self.start


@dataclass(slots=True)
class Receiver:
    """A running receiver."""

    url: str = ""
    """The base URL, as `--otlp-endpoint` takes it."""
    spans: list[GotSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    requests: int = 0
    sent_bytes: int = 0
    """The bytes of answers that clients took."""
    misbehaviour: str = "none"
    released: threading.Event = field(default_factory=threading.Event)

    def traces(self) -> dict[str, list[GotSpan]]:
        """Return the spans by trace."""
        found: defaultdict[str, list[GotSpan]] = defaultdict(list)
        for span in list(self.spans):
            found[span.trace].append(span)
        return dict(found)

    def until(self, true: Callable[[list[GotSpan]], object], seconds: float = 30.0) -> list[GotSpan]:
        """Wait until `true` holds for the spans, and return them.

        Raises:
            AssertionError: It did not become true in time.
        """
        end = time.monotonic() + patience(seconds)
        while not true(list(self.spans)):
            assert time.monotonic() < end, f"{len(self.spans)} spans: {sorted(s.name for s in self.spans)}"
            time.sleep(0.02)
        return list(self.spans)


@contextlib.contextmanager
def receiving(misbehaviour: str = "none") -> Iterator[Receiver]:
    """Run a receiver on a free port of this machine."""
    assert misbehaviour in MISBEHAVIOURS
    receiver = Receiver(misbehaviour=misbehaviour)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            receiver.requests += 1
            with contextlib.suppress(OSError):
                _answer(self, receiver, body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join(patience(5.0))


def _answer(handler: BaseHTTPRequestHandler, receiver: Receiver, body: bytes) -> None:
    match receiver.misbehaviour:
        case "none":
            if handler.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.bodies.append(body)
            receiver.spans += spans_in(body)
            handler.send_response(200)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        case "hangs":
            receiver.released.wait(patience(60.0))
            handler.close_connection = True
        case "drips":
            for part in b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 600:
                handler.wfile.write(bytes([part]))
                handler.wfile.flush()
                if receiver.released.wait(0.1):
                    break
            handler.close_connection = True
        case "garbage":
            handler.wfile.write(b"\x00\x1b[2J\xff\n" * 64)
            handler.close_connection = True
        case "endless":
            handler.send_response(400)
            handler.send_header("Content-Length", str(10 << 30))
            handler.end_headers()
            chunk = b"x" * 65536
            for _ in range((10 << 30) // len(chunk)):
                handler.wfile.write(chunk)
                receiver.sent_bytes += len(chunk)
                if receiver.released.is_set():
                    break
            handler.close_connection = True
        case "redirects":
            handler.send_response(307)
            handler.send_header("Location", f"{receiver.url}/elsewhere")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        case "refuses":
            handler.send_response(400)
            handler.send_header("Content-Length", "7")
            handler.end_headers()
            handler.wfile.write(b"no\n\x1b[1m")


def spans_in(body: bytes) -> list[GotSpan]:
    """Return the spans of one request."""
    request = ExportTraceServiceRequest.FromString(body)
    found = []
    for resource in request.resource_spans:
        service = str(attributes_of(resource.resource.attributes).get("service.name", ""))
        for scope in resource.scope_spans:
            for span in scope.spans:
                found.append(
                    GotSpan(
                        service=service,
                        trace=span.trace_id.hex(),
                        id=span.span_id.hex(),
                        parent=span.parent_span_id.hex(),
                        name=span.name,
                        kind=span.kind,
                        start=span.start_time_unix_nano / 1e9,
                        end=span.end_time_unix_nano / 1e9,
                        attributes=attributes_of(span.attributes),
                        failed=span.status.code == 2,
                    )
                )
    return found


def attributes_of(pairs: Any) -> dict[str, Value]:
    """Return attributes as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Value:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(part) for part in value.array_value.values]
    plain: Value = getattr(value, kind)
    return plain


def problems_of_tree(spans: list[GotSpan]) -> list[str]:
    """Return what keeps the spans of one trace from being one tree with one root."""
    ids = [span.id for span in spans]
    found = [f"id {one} stands {ids.count(one)} times" for one in sorted(set(ids)) if ids.count(one) > 1]
    roots = [span.name for span in spans if not span.parent]
    if len(roots) != 1:
        found.append(f"the roots are {roots}")
    known = set(ids)
    found += [f"{span.name} has no parent" for span in spans if span.parent and span.parent not in known]
    return found
