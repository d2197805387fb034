"""The instrument of the uneven figures: a server of vLLM's shape that takes a fixed time for each token.

`python -m rollyard_bench.paced_model --pace 0.02 --folder DIR --port-file FILE`. The number of tokens of
an answer is drawn from the request's seed, so two servers give the same request the same answer. However
many requests run at once, each takes `pace` seconds per token, and next to no time of a core: a real
server beside the control plane and the worker would share two cores with them, and would keep no pace.
`GET /late` returns by how many seconds the answers came later than the pace says.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

from rollyard_bench.latency_model import LatencyModel, make_tokenizer, serve, write_folder

MEAN_TOKENS = 23.0
SPREAD = 0.27
"""The standard deviation of the logarithm of an answer's tokens. Both are as in the tiny policy's answers to
the same questions, which have a mean of 22.8 tokens and a standard deviation of 6.2."""
MAX_TOKENS = 200
"""No answer is longer, whatever the request allows."""


def tokens_of(seed: int) -> int:
    """Return how many tokens the request with this seed gets, log-normal around MEAN_TOKENS."""
    drawn = random.Random(seed).lognormvariate(-SPREAD * SPREAD / 2, SPREAD)
    return min(MAX_TOKENS, max(2, round(MEAN_TOKENS * drawn)))


class PacedModel(LatencyModel):
    """The ASGI application.

    Args:
        pace: The seconds that each token takes.
    """

    def __init__(self, pace: float) -> None:
        super().__init__(latency=0.0, turns=1)
        self._pace = pace
        self._late: list[float] = []
        tokenizer = make_tokenizer()
        self._letters = list(tokenizer.encode("x" * (MAX_TOKENS - 1) + "<|im_end|>").ids)

    def count(self, request: dict[str, Any]) -> int:
        """Return the number of tokens that the request gets."""
        return min(tokens_of(int(request.get("seed") or 0)), request.get("max_tokens") or MAX_TOKENS)

    def answer(self, request: dict[str, Any]) -> tuple[list[int], str]:
        """Return the token ids of the answer, whose last one ends the turn, and their text."""
        count = self.count(request)
        return self._letters[-count:], "x" * (count - 1)

    async def wait(self, request: dict[str, Any], arrived: float) -> None:
        """Wait until the last token is due."""
        due = arrived + self._pace * self.count(request)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._late.append(time.perf_counter() - due)

    def static(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a request without a body that matters."""
        return {"seconds": self._late} if path == "/late" else super().static(path)


def main() -> None:
    """Serve on a free port of the loopback interface until a signal; the port goes to `--port-file`."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--pace", type=float, required=True, help="seconds per token")
    parse.add_argument("--folder", type=Path, required=True, help="where the tokenizer is written")
    parse.add_argument("--port-file", type=Path, required=True)
    options = parse.parse_args()
    write_folder(options.folder)
    serve(PacedModel(options.pace), options.port_file)


if __name__ == "__main__":
    main()
