"""kill -9 of one of two real vLLM servers in the middle of 200 rollouts: all end, each once, ids exact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.vllm.checker import compare, judge, passes
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.product import Product
from rollyard_testing.vllm.servers import VllmServer
from rollyard_testing.vllm.stage import MAX_TOKENS, Stage, tasks

MakeStage = Callable[..., AbstractContextManager[Stage]]

TASKS, SAMPLES = 25, 8
SECONDS = patience(240.0)

pytestmark = pytest.mark.kills_vllm


@contextmanager
def following(product: Product, job: str, ledger: Ledger) -> Iterator[None]:
    """Read trajectories by cursor into the ledger while the block runs."""
    done = threading.Event()

    def follow() -> None:
        with product.http() as http:
            while not done.wait(0.1):
                ledger.read(http, job)

    thread = threading.Thread(target=follow, name="ledger")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(patience(60))


def test_kill_9_of_a_server_in_the_middle_of_200_rollouts(
    vllm_servers: list[VllmServer], stage: MakeStage, forward: Forward, vllm_model: Path
) -> None:
    with stage() as there:
        there.product.worker("w0", run=64)
        pool = there.pool("qwen3_coder")
        ledger = Ledger()
        expected = there.product.job(
            "killed", pool, tasks("killed", TASKS, turns=5, pause=0.5), SAMPLES,
            sampling={"temperature": 1.0, "maxTokens": MAX_TOKENS},
        )  # fmt: skip
        assert len(expected) == 200
        with following(there.product, "killed", ledger):
            assert ledger.wait_for(40, SECONDS), there.product.words()
            victim, survivor = there.urls[1], there.urls[0]
            vllm_servers[1].kill()
            killed = time.time()
            before = set(ledger.seen)
            assert ledger.wait_for(len(expected), SECONDS), there.product.words()
        found = there.product.results("killed", expected, SECONDS)
        verdict = judge(found, there.served())

    assert len(before) <= 160, "the kill came too late to hit the middle"
    with invariant():
        assert ledger.judge(expected) == []
        # They are exact across the move: turns continued at the survivor from the ids that the victim had
        # sampled.
        assert verdict.findings == []
    assert {one["status"] for one in found} == {"succeeded"}
    assert {one["backend"] for one in found if one["id"] not in before} >= {survivor}
    assert verdict.moved > 0
    assert verdict.tokens == sum(sum(segment["loss_mask"]) for one in found for segment in one["segments"])
    served_late = [one for one in there.served() if one.began > killed + 0.5]
    assert served_late
    assert {one.server for one in served_late} == {survivor}
    assert victim in {one.server for one in there.served()}
    moved = [one for one in found if len(one["turns"]) > 1 and one["backend"] == survivor]
    asked = list(passes(moved))
    assert compare(asked, forward.logprobs(vllm_model, asked)).findings == []
