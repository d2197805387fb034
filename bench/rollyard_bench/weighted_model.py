"""The instrument of `step_overlap`: the fixed-latency model, with vLLM's calls for new weights.

`python -m rollyard_bench.weighted_model --latency 0.5 --turns 4 --folder DIR --port-file FILE`. It has no
weights, only their label, which every token carries. A pause lets the requests in flight end, as vLLM's mode
`wait` does; requests that come meanwhile begin when it resumes. Loading takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import orjson

from rollyard_bench.latency_model import LatencyModel, serve, write_folder


class WeightedModel(LatencyModel):
    """The ASGI application."""

    def __init__(self, latency: float, turns: int) -> None:
        super().__init__(latency, turns)
        self._label = "default"
        self._in_flight = 0
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()
        self._sampling = asyncio.Event()
        self._sampling.set()

    async def respond(self, path: str, body: bytes, arrived: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of a request, which came at `arrived`."""
        match path:
            case "/weight_info":
                return 200, {"weight_version": self._label}
            case "/is_paused":
                return 200, {"is_paused": not self._sampling.is_set()}
            case "/update_weight_version":
                self._label = orjson.loads(body)["new_version"]
            case "/pause":
                self._sampling.clear()
                await self._none_in_flight.wait()
            case "/resume":
                self._sampling.set()
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case _:
                return await super().respond(path, body, arrived)
        return 200, {}

    async def wait(self, request: dict[str, Any], arrived: float) -> None:
        """Wait until the request is to be answered. Its time begins when the server samples."""
        if not self._sampling.is_set():
            await self._sampling.wait()
            arrived = time.perf_counter()
        self._in_flight += 1
        self._none_in_flight.clear()
        try:
            await super().wait(request, arrived)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.set()

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of `/v1/completions`, whose tokens carry the label of the weights."""
        answer = super().completion(request)
        (choice,) = answer["choices"]
        end = len(choice["token_ids"])
        choice["weight_versions"] = [{"version": self._label, "start": 0, "end": end}]
        return answer


def main() -> None:
    """Serve on a free port of the loopback interface until a signal; the port goes to `--port-file`."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--latency", type=float, required=True, help="seconds of each call")
    parse.add_argument("--turns", type=int, required=True, help="model calls of one rollout")
    parse.add_argument("--folder", type=Path, required=True, help="where the tokenizer is written")
    parse.add_argument("--port-file", type=Path, required=True)
    options = parse.parse_args()
    write_folder(options.folder)
    serve(WeightedModel(options.latency, options.turns), options.port_file)


if __name__ == "__main__":
    main()
