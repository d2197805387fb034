"""What traces cost: the processor time of the whole quickstart, with them and without.

Every process below the quickstart counts. The receiver is in this process, which is above it, and only counts
what it gets.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from rollyard_bench.own_cpu import quickstart
from rollyard_bench.processes import ProgramFailed
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline

PAIRS: Final = 5
_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(slots=True)
class _Taken:
    """What the receiver took."""

    url: str = ""
    requests: int = 0
    bytes: int = 0


@contextmanager
def _receiver() -> Iterator[_Taken]:
    taken = _Taken()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            taken.requests += 1
            taken.bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    taken.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


async def _seconds(tasks: int, samples: int, endpoint: str) -> Counter[str]:
    """Run the quickstart, and return the processor time of its processes by kind, in seconds."""
    # An empty value keeps a variable of this environment from applying.
    environment = {**os.environ, **dict.fromkeys(_VARIABLES, ""), _VARIABLES[0]: endpoint}
    return await quickstart(tasks, samples, environment)


async def measure(settings: Settings) -> list[Measurement]:
    """Run pairs of quickstarts, with and without traces, each kind first in turn."""
    tasks, samples, pairs = (16, 8, 2) if settings.quick else (64, 8, PAIRS)
    all_of: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    told = []
    with _receiver() as taken:
        for pair in range(pairs):
            seconds: dict[bool, float] = {}
            for traced in (True, False) if pair % 2 else (False, True):
                found = await _seconds(tasks, samples, taken.url if traced else "")
                all_of[traced] += found
                seconds[traced] = found.total()
            told.append(f"{seconds[True]:.1f} and {seconds[False]:.1f}")
        if not taken.requests:
            raise ProgramFailed("the receiver got nothing")
        sent = taken.bytes / pairs / (tasks * samples)
    kinds = ", ".join(
        f"{kind} {all_of[True][kind] / pairs:.2f} and {all_of[False][kind] / pairs:.2f}"
        for kind in sorted(all_of[False], key=lambda kind: -all_of[False][kind])
    )
    how = (
        f"mean of {pairs} pairs of the quickstart with {tasks * samples} rollouts, all traced, each first "
        f"in turn; user and system time of all its processes with traces and without, in seconds: "
        f"{'; '.join(told)}; by process: {kinds}; {sent:.0f} bytes of spans for each rollout"
    )
    without = Baseline("the same without traces", all_of[False].total() / pairs)
    return [Measurement("trace_overhead", all_of[True].total() / pairs, without, how)]
