"""The gateway's cost: what a call adds to a native agent's turn, streams, long histories, many sessions.

The benchmark is the Run worker: it has the gateway's HTTP servers and sessions. The backend
(`model_servers.StreamingModel`) and the harness (`gateway_client`) are processes of their own, so that their
time is not the worker's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Message, Task
from rollyard_pipeline.agents.base import AgentContext
from rollyard_pipeline.backends.client import BackendClient
from rollyard_pipeline.backends.session import BackendSession, request_seed
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.gateway.server import GatewayServer
from rollyard_pipeline.gateway.session import Chat, GatewaySession
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.tools.base import ToolContext
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import TrajectoryRecorder
from rollyard_testing.crds.segments import lists

from rollyard_bench.gateway_client import PROMPT, TOOLS, observation
from rollyard_bench.model_servers import LONG_MODEL_LEN, MODEL, POLICY, model_server
from rollyard_bench.processes import BENCH, ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import Sample

SEED = 11
KEY = "key"
FIRST, REST = 0.010, 0.010  # seconds until the first token, and from it to the others
SIZE = 1200  # characters of a result
GROWTH, SHORT = 2000, 200  # of results that make a history longer, and of those while it is measured
TURNS = 8
HISTORIES = (2_000, 32_000)  # tokens
SESSIONS = 64
MB = 1e6


class _Harness:
    """The process of `gateway_client`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def play(
        self, urls: Sequence[str], turns: int, *, again: bool, stream: str = "none", size: int = SIZE
    ) -> list[list[dict[str, float]]]:
        """Play some turns with each server at once; return the times of each."""
        asked = {"urls": list(urls), "turns": turns, "again": again, "stream": stream, "size": size}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**asked, "key": KEY}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise ProgramFailed("the harness ended; its error is above")
        played: list[list[dict[str, float]]] = json.loads(line)
        return played


@asynccontextmanager
async def _harness() -> AsyncIterator[_Harness]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard_bench.gateway_client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
        cwd=BENCH,
    )
    try:
        yield _Harness(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@dataclass(slots=True)
class _Yard:
    """What a Run worker has, and a backend."""

    client: BackendClient
    url: str
    folder: Path
    formats: FormatCache = field(default_factory=FormatCache)

    async def chat(self, tools: Sequence[Mapping[str, Any]]) -> Chat:
        return Chat(await self.formats.get(str(self.folder), tools), "hermes", HermesParser())

    def backend(self, task: str) -> BackendSession:
        async def route(failed: str, error: str, blame: bool) -> RouteResponse:
            raise ProgramFailed(f"the backend failed: {error}")

        assignment = BackendAssignment(
            pool="p", url=self.url, model=MODEL, tokenizer=str(self.folder), policy_version="1"
        )
        return BackendSession(
            self.client, assignment, route, SamplingSpec(seed=SEED), task_id=task, sample_index=0
        )

    async def native(self, task: str) -> Native:
        chat = await self.chat(TOOLS)
        episode = Episode([Message(role="user", content=PROMPT)])
        episode.recorder = TrajectoryRecorder(chat.format, chat.format.opening(episode.messages))
        context = AgentContext(
            task=Task(id=task, prompt=PROMPT),
            spec=_SPEC,
            sampling=SamplingSpec(seed=SEED),
            episode=episode,
            tools={},
            parser=chat.parser,
            session=self.backend(task),
            tool_context=ToolContext(client=None, timeout=1.0, max_output_bytes=1),
        )
        return Native(episode, context)

    @asynccontextmanager
    async def session(self, task: str) -> AsyncIterator[tuple[str, GatewaySession]]:
        """Yield the URL and the session of a new rollout."""
        session = GatewaySession(
            spec=_SPEC,
            sampling=SamplingSpec(seed=SEED),
            episode=Episode([Message(role="user", content=PROMPT)]),
            key=KEY,
            model=MODEL,
            context=LONG_MODEL_LEN,
            chats=self.chat,
            sessions=lambda: self.backend(task),
        )
        server = GatewayServer(session)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", session
        finally:
            listener.close()
            await session.close(CallError("ended", "the harness has ended"))
            await server.aclose()


_SPEC = AgentSpec(max_turns=1000, max_context_tokens=LONG_MODEL_LEN)


@dataclass(slots=True)
class Native:
    """A rollout that our own agent plays."""

    episode: Episode
    context: AgentContext
    turns: int = 0

    async def play(self, turns: int, size: int = SIZE) -> list[float]:
        """Play some turns; return the seconds that each one took, without its tools."""
        seconds = []
        for _ in range(turns):
            begin = time.perf_counter()
            turn = await self.context.turn()
            seconds.append(time.perf_counter() - begin)
            if turn is None or not turn.calls:
                raise ProgramFailed("the native agent's turn made no call: nothing was measured")
            for call in turn.calls:
                self.episode.add_observation(call, observation(self.turns, size), None, 0.0)
            self.turns += 1
        return seconds

    def tokens(self) -> int:
        """Return the number of tokens of the conversation."""
        assert self.episode.recorder is not None
        return sum(
            len(segment.prompt_ids) + len(segment.response_ids)
            for segment in lists(self.episode.recorder.segments())
        )


def _seconds(turns: Sequence[dict[str, float]]) -> list[float]:
    return [turn["end"] - turn["begin"] for turn in turns]


def _same(session: GatewaySession, native: Native) -> int:
    """Check that both have recorded the same, and that no token of it was tokenized twice.

    Returns:
        The number of tokens that came from outside.
    """
    assert native.episode.recorder is not None
    expected, record = lists(native.episode.recorder.segments()), session.conversations.branches()
    if record.branches or lists(record.segments) != expected or len(expected) != 1:
        raise ProgramFailed("the gateway's record is not the native agent's: nothing was measured")
    (segment,) = expected
    outside = len(segment.prompt_ids) + segment.loss_mask.count(0)
    stats = session.stats.gateway
    assert stats is not None
    if stats.tokenized != outside or stats.segments or stats.unmatched:
        raise ProgramFailed(f"{stats.tokenized} tokens were tokenized for {outside} of outside text")
    return outside


async def _calls(yard: _Yard, harness: _Harness, rounds: int) -> Measurement:
    """Play rollouts with the same seeds, natively and through the gateway, in turns."""
    added: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds + 1):
        native = await yard.native(f"call-{number}")
        async with yard.session(f"call-{number}") as (url, session):

            async def gateway(url: str = url) -> list[float]:
                return _seconds((await harness.play([url], TURNS, again=True))[0])

            if number % 2:
                through, alone = await gateway(), await native.play(TURNS)
            else:
                alone, through = await native.play(TURNS), await gateway()
        _same(session, native)
        if number:  # The first round is a warm-up.
            ours += [seconds * 1e3 for seconds in through]
            theirs += [seconds * 1e3 for seconds in alone]
            added += [(one - other) * 1e3 for one, other in zip(through, alone, strict=True)]
    how = (
        f"rollouts of {TURNS} turns, natively and through the gateway in turns, with the same seeds and the "
        f"same ids in both records; a call of Chat Completions as the harness's HTTP client (httpx, another "
        f"process) sees it {Sample(tuple(ours)).text()}; the native agent's turn "
        f"{Sample(tuple(theirs)).text()}; the backend takes {(FIRST + REST) * 1e3:.0f} ms of both; "
        f"added, call by call: {Sample(tuple(added)).text()}"
    )
    return Measurement(
        "gateway_call", median(added), Baseline("the native agent's turn", median(theirs)), how
    )


async def _first_events(yard: _Yard, harness: _Harness, rounds: int) -> Measurement:
    """Compare when the backend sends its first token with when the harness has the first event of a text."""
    late: list[float] = []
    async with httpx.AsyncClient(trust_env=False) as http:
        for number in range(rounds + 1):
            task = f"first-{number}"
            async with yard.session(task) as (url, _):
                (played,) = await harness.play([url], TURNS, again=True, stream="all")
            firsts = (await http.get(f"{yard.url}/firsts")).json()["seconds"]
            for turn, times in enumerate(played if number else ()):
                sent = firsts[str(request_seed(SEED, task, 0, turn))]
                late.append((times["first"] - sent) * 1e3)
    how = (
        "streamed calls of Chat Completions; from the time at which the backend sends the first token to "
        "that at which the harness's HTTP client (httpx, another process) has read the first event with "
        f"text: {Sample(tuple(late)).text()}"
    )
    return Measurement("gateway_first_event", median(late), None, how)


async def _histories(yard: _Yard, harness: _Harness, rounds: int) -> Measurement:
    """Measure what a call adds at a short and at a long history of the same conversations."""
    added: dict[int, list[float]] = {history: [] for history in HISTORIES}
    tokenized = 0
    for number in range(rounds):
        native = await yard.native(f"history-{number}")
        async with yard.session(f"history-{number}") as (url, session):

            async def turn(size: int, native: Native = native, url: str = url) -> float:
                """Play a turn on both sides, and return what the call adds, in milliseconds."""
                again = not native.turns
                (alone,) = await native.play(1, size)
                ((through,),) = await harness.play([url], 1, again=again, size=size)
                return (through["end"] - through["begin"] - alone) * 1e3

            for history in HISTORIES:
                while native.tokens() < history:
                    await turn(GROWTH)
                added[history] += [await turn(SHORT) for _ in range(TURNS)]
        tokenized += _same(session, native)
    short, long = (Sample(tuple(added[history])) for history in HISTORIES)
    how = (
        f"what a call adds to the native agent's turn at {HISTORIES[1]:,} tokens of history "
        f"({long.text()}) and at {HISTORIES[0]:,} ({short.text()}), of the same conversations; nothing was "
        f"tokenized twice: the gateway's counter is the number of tokens from outside, {tokenized:,}"
    )
    baseline = Baseline(f"the same at {HISTORIES[0]:,} tokens", short.p50)
    return Measurement("gateway_history", long.p50, baseline, how)


async def _many(yard: _Yard, harness: _Harness) -> list[Measurement]:
    """Measure this process's time and memory for many sessions at once, half of whose calls are streamed."""
    process = psutil.Process()
    async with _sessions(yard, "warm", 8) as warm:
        await harness.play([url for url, _ in warm], TURNS, again=True, stream="half")
    gc.collect()
    memory = process.memory_info().rss
    async with _sessions(yard, "many", SESSIONS) as many:
        used = time.process_time()
        await harness.play([url for url, _ in many], TURNS, again=True, stream="half")
        used = time.process_time() - used
        gc.collect()
        memory = process.memory_info().rss - memory
        tokens = sum(
            len(segment.prompt_ids) + len(segment.response_ids)
            for _, session in many
            for segment in lists(session.conversations.branches().segments)
        )
    calls = SESSIONS * TURNS
    cpu = (
        f"user and system time of the worker for each of {calls} calls of Chat Completions, half of them "
        f"streamed, of {SESSIONS} sessions at once: HTTP, matching, tokenizing, the request to the backend, "
        f"parsing and recording"
    )
    size = (
        f"resident memory that {SESSIONS} sessions with {TURNS} calls each add to the worker, each with "
        f"{tokens / SESSIONS:,.0f} tokens, which are part of the figure"
    )
    return [
        Measurement("gateway_cpu", used / calls * 1e3, None, cpu),
        Measurement("gateway_memory", memory / SESSIONS / MB, None, size),
    ]


@asynccontextmanager
async def _sessions(yard: _Yard, name: str, count: int) -> AsyncIterator[list[tuple[str, GatewaySession]]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(yard.session(f"{name}-{number}")) for number in range(count)]


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the gateway with a harness and a backend in processes of their own."""
    rounds = 5 if settings.quick else 20
    with tempfile.TemporaryDirectory(prefix="ryb-") as name:
        folder = Path(name)
        async with (
            model_server("streaming", folder, "model", FIRST, REST) as url,
            BackendClient() as client,
            _harness() as harness,
        ):
            yard = _Yard(client, url, POLICY)
            return [
                await _calls(yard, harness, rounds),
                await _first_events(yard, harness, rounds),
                await _histories(yard, harness, 2 if settings.quick else 4),
                *await _many(yard, harness),
            ]
