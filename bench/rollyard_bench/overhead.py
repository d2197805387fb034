"""What a turn of the Run stage takes beyond the backend's own time, on the real path."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rollyard_crds import Trajectory
from rollyard_pipeline.backends.session import request_seed
from rollyard_testing.vllm.proxy import recording
from rollyard_testing.vllm.servers import SERVED, VllmServer

from rollyard_bench.harness import deployment, manifest
from rollyard_bench.processes import ROOT, ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import Sample
from rollyard_bench.vllm import vllm_servers

TASKS = ROOT / "examples" / "quickstart" / "tasks.jsonl"
SAMPLES = 2
SEED = 0
JOB_SECONDS = 120.0
BARE = 80
"""The number of bare round trips beside each run. Half of them come before it, the others after it."""
BARE_PROMPT, BARE_TOKENS = 400, 20
"""The tokens of a bare request and of its answer, which are about as many as those of a turn."""
_SEED = re.compile(r'"seed":\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Run:
    """The milliseconds per turn, over all turns of a job."""

    ours: Sample
    """A turn's wall time and its share of the rest of Run, without tools and without the backend's own time.
    """
    backend: Sample
    """The backend's own time."""
    outside: Sample
    """The part of `ours` that is not spent in the model call: template, tokenizer, sandbox, record."""
    bare: Sample
    """The milliseconds of a bare round trip over the same hops, without the backend's own time."""


def _job(name: str, tasks: int) -> dict[str, Any]:
    lines = TASKS.read_text().splitlines()[:tasks]
    return manifest(
        name,
        tasks={"inline": [json.loads(line) for line in lines]},
        handler="shell",
        samplesPerTask=SAMPLES,
        agent={"type": "tools", "tools": ["bash", "edit", "submit"], "maxTurns": 8, "maxContextTokens": 1024},
        sampling={"temperature": 1.0, "maxTokens": 64, "seed": SEED},
        backendRef={"name": "vllm"},
        sandbox={"resources": {"memory": "256Mi", "disk": "64Mi"}},
        stages={"init": {"concurrency": 2}, "run": {"concurrency": 1}, "eval": {"concurrency": 2}},
    )


async def _run(folder: Path, server: VllmServer, tasks: int) -> Run:
    """Run one job, one rollout at a time, on a control plane and a worker of its own."""
    name = "overhead"
    with recording(server.url, folder, "proxy") as proxy:
        async with deployment(folder, {"init": 2, "run": 1, "eval": 2}) as deployed:
            await deployed.external_pool("vllm", SERVED, server.model, [proxy.url])
            bare = await _round_trips(proxy.url, BARE // 2, 1)
            await deployed.client.submit(_job(name, tasks))
            delivered = await deployed.deliver(name, tasks * SAMPLES, JOB_SECONDS)
            bare |= await _round_trips(proxy.url, BARE // 2, 1 + BARE // 2)
        exchanges = [(_SEED.search(one.request), one.ended - one.began) for one in proxy.exchanges()]
    return _turns(delivered, {int(seed[1]): seconds for seed, seconds in exchanges if seed}, bare)


async def _round_trips(url: str, count: int, first: int) -> dict[int, float]:
    """Return the seconds of bare requests to the backend through the proxy, one at a time, by their seeds.

    They have a turn's size, and are sent by the HTTP client library that the worker uses, with nothing around
    it. Their seeds begin with `first`. They are so small that no turn has one of them.
    """
    body = {
        "model": SERVED,
        "prompt": list(range(100, 100 + BARE_PROMPT)),
        "max_tokens": BARE_TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
    }
    seconds: dict[int, float] = {}
    async with aiohttp.ClientSession() as session:
        for seed in range(first, first + count):
            begin = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body | {"seed": seed}) as answer:
                answer.raise_for_status()
                await answer.json()
            seconds[seed] = time.perf_counter() - begin
    return seconds


def _turns(delivered: list[Trajectory], own: Mapping[int, float], bare: Mapping[int, float]) -> Run:
    """Join the product's records with the proxy's. Each request carries a seed of its own."""
    ours: list[float] = []
    backend: list[float] = []
    outside: list[float] = []
    for one in delivered:
        if one.status != "succeeded" or not one.turns:
            raise ProgramFailed(f"{one.id}: {one.status} {one.reason} {one.message[:300]}")
        rest = one.timings.own_seconds / len(one.turns)
        for number, turn in enumerate(one.turns):
            seed = request_seed(SEED, one.task_id, one.sample_index, number)
            if seed not in own:
                raise ProgramFailed(f"{one.id}: turn {number} was not recorded by the proxy")
            backend.append(own[seed] * 1e3)
            outside.append(rest * 1e3)
            ours.append((turn.model_seconds - own[seed] + rest) * 1e3)
    if missing := bare.keys() - own.keys():
        raise ProgramFailed(f"{len(missing)} bare round trips were not recorded by the proxy")
    trips = tuple((seconds - own[seed]) * 1e3 for seed, seconds in bare.items())
    return Run(Sample(tuple(ours)), Sample(tuple(backend)), Sample(tuple(outside)), Sample(trips))


async def measure(settings: Settings) -> list[Measurement]:
    """Measure one rollout at a time."""
    tasks = 8 if settings.quick else 40
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with vllm_servers(Path(name), 1) as (server,):
            alone = await _run(Path(name), server, tasks)
    how = (
        "wall time of a turn in the worker (rendering, tokenizing, the request through the session, parsing, "
        "recording, and its share of what else Run does, such as attaching the sandbox), less the tools and "
        "less the backend's own time, from a request's arrival at a recording proxy in front of the server "
        "to the end of its answer; one rollout at a time: "
        f"{alone.ours.text()}, {alone.outside.p50:.3g} ms of it outside of the model call; backend's own "
        f"time {alone.backend.text()}; the baseline is a bare HTTP request of a turn's size through the same "
        f"proxy to the same server, less the backend's own time: {alone.bare.text()}"
    )
    baseline = Baseline("bare round trip", alone.bare.p50)
    return [Measurement("turn_overhead", alone.ours.p50, baseline, how)]
