"""Prefix-cache hits of growing conversations over two vLLM servers, by routing policy."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollyard_api.backends.router import Backend, Router
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_testing.vllm.servers import SERVED, VllmServer

from rollyard_bench.processes import ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.vllm import vllm_servers

TURNS = 8
FIRST = 600  # tokens of the first prompt, which the samples of a group share
SAMPLED = 16  # tokens of a turn
OUTSIDE = 400  # tokens that follow a turn: tool results
GROUP = 8
SLOTS = 16  # rollouts in flight
MAX_ACTIVE = 256
CONTEXT = 8192
WORDS = range(300, 1060)  # plain tokens of the tiny policy's vocabulary
SEED = 7
COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One conversation to play."""

    group: str
    sample: int


class Hits(NamedTuple):
    """The prompt tokens that were looked up in the prefix caches, those that were found, and the seconds."""

    queried: float
    cached: float
    seconds: float

    @property
    def percent(self) -> float:
        """The share of the tokens that were found, in per cent."""
        return 100 * self.cached / self.queried

    def text(self) -> str:
        """Return the figures as text."""
        return f"{self.percent:.1f}%, {self.queried - self.cached:,.0f} tokens computed, {self.seconds:.0f} s"


class Ours:
    """The control plane's router, used as it is when a Run lease is given out."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self._active: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._groups: dict[str, str] = {}

    def begin(self, rollout: Rollout) -> str:
        """Return the server that the router chooses for a rollout that begins."""
        router = Router.of(
            [Backend(url, active=self._active[url], max_active=MAX_ACTIVE) for url in self.urls]
        )
        together = GROUP - self._ended[rollout.group]
        chosen = router.choose(None, self._groups.get(rollout.group), together=together)
        if chosen is None:
            raise ProgramFailed("the router gave no backend though all have room")
        self._groups[rollout.group] = chosen.url
        self._active[chosen.url] += 1
        return chosen.url

    def request(self, own: str) -> str:
        """Return the server of the next request of a rollout that has begun on `own`."""
        return own

    def end(self, rollout: Rollout, own: str) -> None:
        """Give the rollout's slot back."""
        self._active[own] -= 1
        self._ended[rollout.group] += 1


class Drawn(Ours):
    """Every request goes to a server drawn at random, wherever its rollout has begun."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(urls)
        self._draw = random.Random(SEED)

    def request(self, own: str) -> str:
        """Return a server drawn at random."""
        return self._draw.choice(self.urls)


async def _stay(url: str, error: str, blame: bool = True) -> RouteResponse:
    raise ProgramFailed(f"{url} failed in the middle of the measurement: {error}")


def _words(kind: str, rollout: Rollout, turn: int, count: int) -> list[int]:
    """Return outside text, which is the same under every policy. A group shares its first prompt."""
    sample = "" if kind == "task" else f"{rollout.sample}:{turn}"
    return random.Random(f"{SEED}:{kind}:{rollout.group}:{sample}").choices(WORDS, k=count)


async def _play(client: BackendClient, policy: Ours, rollout: Rollout) -> None:
    """Play one rollout of 8 turns. Each prompt is the one before, what was sampled, and the tools' output."""
    own = policy.begin(rollout)
    try:
        session = BackendSession(
            client,
            _assignment(own),
            _stay,
            SamplingSpec(max_tokens=SAMPLED, seed=SEED),
            task_id=rollout.group,
            sample_index=rollout.sample,
        )
        ids = _words("task", rollout, 0, FIRST)
        for turn in range(TURNS):
            session.backend = _assignment(policy.request(own))
            sample = await session.turn(ids, SAMPLED, turn)
            ids = [*ids, *sample.token_ids, *_words("tool", rollout, turn, OUTSIDE)]
    finally:
        policy.end(rollout, own)


def _assignment(url: str) -> BackendAssignment:
    return BackendAssignment(pool="bench", url=url, model=SERVED, tokenizer="")


async def _hits(policy: Ours, servers: Sequence[VllmServer], groups: int) -> Hits:
    """Return the servers' own counts while all rollouts are played over emptied caches."""
    for server in servers:
        await asyncio.to_thread(server.call, "/reset_prefix_cache")
    before = [sum(server.metric(name) for server in servers) for name in COUNTERS]
    waiting = deque(Rollout(f"group-{n:02d}", sample) for n in range(groups) for sample in range(GROUP))

    async def slot(client: BackendClient) -> None:
        while waiting:
            await _play(client, policy, waiting.popleft())

    begin = time.perf_counter()
    async with BackendClient() as client, asyncio.TaskGroup() as tasks:
        for _ in range(SLOTS):
            tasks.create_task(slot(client))
    seconds = time.perf_counter() - begin
    after = [sum(server.metric(name) for server in servers) for name in COUNTERS]
    return Hits(after[0] - before[0], after[1] - before[1], seconds)


async def measure(settings: Settings) -> list[Measurement]:
    """Measure both policies over the same conversations."""
    groups = 3 if settings.quick else 8
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        async with vllm_servers(Path(name), 2, CONTEXT) as servers:
            urls = [server.url for server in servers]
            ours = await _hits(Ours(urls), servers, groups)
            drawn = await _hits(Drawn(urls), servers, groups)
    longest = FIRST + (TURNS - 1) * (SAMPLED + OUTSIDE)
    how = (
        f"{groups} groups of {GROUP}, {TURNS} turns from {FIRST} to at most {longest:,} tokens, {SLOTS} "
        f"rollouts in flight, two vLLM servers, the same conversations and emptied caches for each policy, "
        f"the servers' own counters; ours {ours.text()}; random {drawn.text()}; random chooses for every "
        "request"
    )
    return [Measurement("prefix_hits", ours.percent, Baseline("random, per request", drawn.percent), how)]
