"""What traces cost: the processor time of the whole quickstart, with them and without.

Every process below the quickstart counts. The receiver is in this process, which is above it, and only counts
what it gets.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from rollyard_bench.own_cpu import LOOK_SECONDS, RUN_SECONDS, Tree
from rollyard_bench.processes import ProgramFailed, program
from rollyard_bench.registry import Measurement, Settings

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


async def _seconds(tasks: int, samples: int, endpoint: str) -> float:
    """Run the quickstart, and return the processor time of all its processes in seconds."""
    # An empty value keeps a variable of this environment from applying.
    environment = {**os.environ, **dict.fromkeys(_VARIABLES, ""), _VARIABLES[0]: endpoint}
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "rollyard", "quickstart", "--out", str(folder / "out")]
        command += ["--tasks", str(tasks), "--samples", str(samples)]
        async with (
            asyncio.timeout(RUN_SECONDS),
            program(command, folder / "quickstart.log", environment) as running,
        ):
            tree = Tree(running.process.pid)
            ended = asyncio.ensure_future(running.process.wait())
            while not ended.done():
                tree.look()
                await asyncio.wait({ended}, timeout=LOOK_SECONDS)
            if running.process.returncode != 0:
                raise ProgramFailed(f"the quickstart failed: {running.tail()}")
        done = json.loads((folder / "out" / "summary.json").read_text())
    if done["rollouts"] != tasks * samples:
        raise ProgramFailed(f"the quickstart has {done['rollouts']} of {tasks * samples} rollouts")
    return tree.totals().total()


async def measure(settings: Settings) -> list[Measurement]:
    """Run pairs of quickstarts, with and without traces, each kind first in turn."""
    tasks, samples, pairs = (16, 8, 2) if settings.quick else (64, 8, PAIRS)
    shares, told = [], []
    with _receiver() as taken:
        for pair in range(pairs):
            seconds: dict[bool, float] = {}
            for traced in (True, False) if pair % 2 else (False, True):
                seconds[traced] = await _seconds(tasks, samples, taken.url if traced else "")
            shares.append(100.0 * (seconds[True] / seconds[False] - 1.0))
            told.append(f"{seconds[True]:.1f} and {seconds[False]:.1f}")
        if not taken.requests:
            raise ProgramFailed("the receiver got nothing")
        sent = taken.bytes / pairs / (tasks * samples)
    how = (
        f"median of {pairs} pairs of the quickstart with {tasks * samples} rollouts, all traced, each "
        f"kind first in turn; user and system time of all its processes with and without traces, in seconds: "
        f"{'; '.join(told)}; in percent: {', '.join(f'{share:+.1f}' for share in shares)}; {sent:.0f} bytes "
        f"of spans for each rollout"
    )
    return [Measurement("trace_overhead", statistics.median(shares), None, how)]
