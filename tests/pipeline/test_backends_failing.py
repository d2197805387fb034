"""Backends that are overloaded, broken, gone, endless or slow: every one has its outcome."""

from __future__ import annotations

import asyncio
import math
import socket
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_inference.errors import BackendMismatch, BackendUnavailable, ContextOverflow, WeightsChanged
from rollyard_inference.sampling.request import Sampling
from rollyard_pipeline.backends import BackendClient, BackendSession, session
from rollyard_pipeline.errors import PipelineError
from rollyard_pipeline.trajectories.recorder import Sample
from rollyard_testing.pace import patience


class Router:
    """The control plane's part, which gives one backend, and keeps what was reported to it."""

    def __init__(self, to: BackendAssignment | None) -> None:
        self.to = to
        self.asked: list[tuple[str, str, bool]] = []

    async def __call__(self, url: str, error: str, blame: bool) -> RouteResponse:
        self.asked.append((url, error, blame))
        return RouteResponse(backend=self.to, retry_after=0.05)


def _status(status: int, **headers: str) -> Callable[[Any], Any]:
    def reply(body: dict[str, Any]) -> Any:
        return web.Response(
            status=status, text="busy", headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return reply


def _with_logprob(body: dict[str, Any], value: float) -> dict[str, Any]:
    """Return an answer of two tokens, the second with this log-probability."""
    content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": value}]
    choice = {"token_ids": [5, 6], "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}


async def _cut(server: Any, *, chunks: int, pause: float) -> web.StreamResponse:
    """Announce a long answer, send a part of it byte by byte, and close the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(server.request)
    for _ in range(chunks):
        await response.write(b'{"choices": [')
        await asyncio.sleep(pause)
    server.request.transport.close()
    return response


async def test_errors_are_retried_then_another_backend_goes_on_from_the_same_ids(backend: Any) -> None:
    broken, sound = backend(generate=_status(500)), backend(generate=backend.generated)
    async with broken, sound, BackendClient() as client:
        router = Router(sound.assignment)
        talk = broken.session(client, router)
        sample = await talk.turn([1, 2, 3], 8, 0)
        assert talk.backend.url == sound.url
        assert talk.failing is None
    assert sample.token_ids == (5, 6)
    assert len(broken.requests) == 2
    ((url, error, blame),) = router.asked
    assert (url, blame) == (broken.url, True)
    assert "500" in error
    assert sound.requests[0][1] == broken.requests[0][1]
    assert talk.stats.requests == 1
    assert talk.stats.sampled_tokens == 2


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda body: web.Response(text="<html>"), "not JSON"),
        (lambda body: web.Response(text='{"choices": [{"tok'), "not JSON"),
        (lambda body: [], "the answer is list"),
        (_status(302, Location="http://elsewhere/"), "a redirect to http://elsewhere/"),
        (_status(204), "expected 200"),
        (
            lambda body: {"choices": [{"token_ids": [5]}], "usage": {"prompt_tokens": 1}},
            "logprobs is missing",
        ),
        (lambda body: _with_logprob(body, -9999.0), "of the sampled token 6, is -9999.0, expected a number"),
        (lambda body: _with_logprob(body, math.nan), "of the sampled token 6, is nan, expected a number"),
    ],
)
async def test_an_impossible_answer_is_blamed_and_asked_of_another(
    backend: Any, reply: Callable[[Any], Any], says: str
) -> None:
    liar, sound = backend(generate=reply), backend(generate=backend.generated)
    async with liar, sound, BackendClient() as client:
        router = Router(sound.assignment)
        sample = await liar.session(client, router).turn([1], 8, 0)
        assert sample.token_ids == (5, 6)
        assert len(liar.requests) == 1
        ((_, error, blame),) = router.asked
        assert blame
        assert says in error

        alone = liar.session(client, Router(liar.assignment))
        with pytest.raises(BackendMismatch, match=says):
            await alone.turn([1], 8, 0)
    assert len(liar.requests) == 4, "an impossible answer was asked for without end"


@pytest.mark.parametrize("status", [429, 503])
async def test_overload_is_waited_for_as_long_as_the_server_says(backend: Any, status: int) -> None:
    times: list[float] = []

    def reply(body: dict[str, Any]) -> Any:
        times.append(time.monotonic())
        return backend.generated(body) if len(times) > 1 else _status(status, Retry_After="0.7")(body)

    async with backend(generate=reply) as server, BackendClient() as client:
        talk = server.session(client)
        waited: list[float] = []
        talk.on_wait = waited.append
        sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (5, 6)
    assert times[1] - times[0] >= 0.7
    assert waited == [0.7], "the wait for an overloaded backend was taken for the policy's own time"
    assert talk.model_seconds < times[1] - times[0]


@pytest.mark.parametrize(
    ("status", "headers", "blame"),
    [
        (429, {}, False),
        (503, {"Retry_After": "0"}, False),
        (503, {}, True),
        (500, {"Retry_After": "0"}, True),
    ],
)
async def test_overload_is_no_blame(backend: Any, status: int, headers: dict[str, str], blame: bool) -> None:
    busy, free = backend(generate=_status(status, **headers)), backend(generate=backend.generated)
    async with busy, free, BackendClient() as client:
        router = Router(free.assignment)
        await busy.session(client, router).turn([1], 8, 0)
    assert [said for _, _, said in router.asked] == [blame]


async def test_connections_that_break_and_trickle_are_left(backend: Any) -> None:
    closes = backend(generate=lambda body: _cut(closes, chunks=3, pause=0.0))
    still = {"/metrics": lambda: web.Response(text="vllm:generation_tokens_total 7\n")}
    drips = backend(generate=lambda body: _cut(drips, chunks=400, pause=0.05), states=still)
    floods = backend(generate=lambda body: web.Response(body=b" " * 200_000))
    sound = backend(generate=backend.generated)
    bounds: dict[str, Any] = {"stall_timeout": 2.0, "max_answer_bytes": 100_000}
    async with closes, drips, floods, sound, BackendClient(**bounds) as client:
        for server, says in (
            (closes, "ClientPayloadError"),
            (drips, "no sign that the server computes"),
            (floods, "longer than 100000 bytes"),
        ):
            router = Router(sound.assignment)
            sample = await server.session(client, router).turn([1], 8, 0)
            assert sample.token_ids == (5, 6)
            assert says in router.asked[0][1]


async def test_without_any_backend_the_rollout_gives_up(unused_port: int) -> None:
    nowhere = BackendAssignment(pool="p", url=f"http://127.0.0.1:{unused_port}", model="tiny", tokenizer="t")
    async with BackendClient() as client:
        talk = _session(client, nowhere, budget=0.5)
        with pytest.raises(BackendUnavailable, match=r"no backend answered for 0\.5 s") as caught:
            await talk.turn([1], 8, 0)
        assert talk.failing is not None
    assert caught.value.retryable


def _session(client: BackendClient, backend: BackendAssignment, budget: float) -> BackendSession:
    return BackendSession(
        client, backend, Router(None), SamplingSpec(), task_id="t", sample_index=0, budget=budget
    )


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_turn_cut_off_is_the_policys_own_only_if_the_backend_answers(
    backend: Any, hangs: bool
) -> None:
    asked = 0

    async def slow(body: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        if hangs or asked == 1:
            await asyncio.sleep(60)
        content = [{"token_id": 5, "logprob": -0.5}]
        choice = {"token_ids": [5], "logprobs": {"content": content}, "finish_reason": "length"}
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}

    async with backend(generate=slow) as server, BackendClient() as client:
        talk = server.session(client, probe_seconds=0.3)
        assert await talk.silence() is None, "nothing was asked yet"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await talk.turn([1, 2], 8, 0)
        silence = await talk.silence()
    assert silence == (f"{server.url}: not one token within 0.3 s" if hangs else None)


async def test_a_cancelled_turn_closes_its_request_at_once(backend: Any) -> None:
    gone = asyncio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        transport = server.request.transport
        while not transport.is_closing():  # noqa: ASYNC110 - another task closes it
            await asyncio.sleep(0.01)
        gone.set()

    server = backend(generate=hang)
    async with server, BackendClient() as client:
        turn = asyncio.ensure_future(server.session(client).turn([1], 8, 0))
        async with asyncio.timeout(patience(10)):
            while not server.requests:  # noqa: ASYNC110 - the server notes it
                await asyncio.sleep(0.01)
            turn.cancel()
            await gone.wait()
        with pytest.raises(asyncio.CancelledError):
            await turn


def _sample(count: int = 2, finish: str = "stop", version: str = "v", first: int = 5) -> Sample:
    ids = tuple(range(first, first + count))
    return Sample(ids, (-0.5,) * count, (version,) * count, finish)


def _at(name: str) -> BackendAssignment:
    return BackendAssignment(pool="p", url=f"http://{name}", model="tiny", tokenizer="t")


BUSY = BackendUnavailable("too busy", overloaded=True)
DOWN = BackendUnavailable("down")


class Scripted:
    """A client whose answers the test scripts, on a clock that only the waits of the session move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.answers: list[Sample | Exception] = []
        """The next answers. Each takes as many seconds as `seconds` says."""
        self.always: Sample | Exception | None = None
        """The answer of requests for which there is none in `answers`."""
        self.seconds = 0.0
        self.asked: list[tuple[str, list[int], Sampling]] = []
        self.routed: list[tuple[str, str, bool]] = []
        self.routes: list[RouteResponse] = []
        """The control plane's next answers. Without any, the rollout stays where it is."""
        self.labels: list[str | Exception | None] = []
        self.modes: dict[str, list[str]] = {}
        self.waited: list[float] = []
        monkeypatch.setattr(session, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        sleeping = types.SimpleNamespace(sleep=self._sleep, timeout=asyncio.timeout)
        monkeypatch.setattr(session, "asyncio", sleeping)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now += seconds

    async def sample(
        self, backend: BackendAssignment, prompt: Sequence[int], sampling: Sampling, *more: Any
    ) -> Sample:
        self.asked.append((backend.url.removeprefix("http://"), list(prompt), sampling))
        self.now += self.seconds
        answer = self.answers.pop(0) if self.answers else self.always
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None, "a request that the test does not expect"
        return answer

    async def kept(self, request: Any) -> Sample | None:
        return None

    async def weight_label(self, backend: BackendAssignment) -> str | None:
        label = self.labels.pop(0)
        if isinstance(label, Exception):
            raise label
        return label

    async def logprobs_mode(self, backend: BackendAssignment) -> str:
        modes = self.modes.get(backend.url.removeprefix("http://"), ["raw_logprobs"])
        return modes.pop(0) if len(modes) > 1 else modes[0]

    async def is_paused(self, url: str) -> bool:
        return False

    async def _route(self, url: str, error: str, blame: bool) -> RouteResponse:
        self.routed.append((url.removeprefix("http://"), error, blame))
        return self.routes.pop(0) if self.routes else RouteResponse(backend=self.talk.backend)

    def session(self, **options: Any) -> BackendSession:
        options = {"task_id": "t", "sample_index": 1, "budget": 20.0, **options}
        self.talk = BackendSession(self, _at("a"), self._route, SamplingSpec(), **options)
        self.talk.on_wait = self.waited.append
        return self.talk


@pytest.fixture
def scripted_client(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


@pytest.mark.parametrize(("error", "seconds"), [(DOWN, 19.0), (BUSY, 299.0)])
async def test_each_answer_starts_the_budget_anew(
    scripted_client: Scripted, error: BackendUnavailable, seconds: float
) -> None:
    """A rollout that had a failure in an early turn has its whole budget in a later one."""
    talk = scripted_client.session()
    for turn in range(3):
        scripted_client.answers = [error, error, _sample()]
        scripted_client.now += seconds
        await talk.turn([1], 8, turn)
        assert talk.failing is None
    scripted_client.always = error
    begun = scripted_client.now
    with pytest.raises(BackendUnavailable, match=f"no backend answered for {seconds + 1:g} s; last: {error}"):
        await talk.turn([1], 8, 3)
    assert scripted_client.now - begun == pytest.approx(seconds + 1)
    assert talk.failing == str(error)
    assert await talk.silence() == str(error)
    assert (talk.stats.requests, talk.stats.sampled_tokens) == (3, 6)


async def test_failures_after_a_busy_time_have_a_budget_of_their_own(scripted_client: Scripted) -> None:
    talk = scripted_client.session(budget=10.0)
    scripted_client.seconds = 4.0
    scripted_client.answers = [BUSY] * 20 + [DOWN, _sample()]
    await talk.turn([1], 8, 0)
    assert talk.waited_seconds == pytest.approx(sum(scripted_client.waited))
    assert talk.model_seconds == pytest.approx(scripted_client.now - 1000.0 - talk.waited_seconds)
    # Those of a backend that is down are no waits that somebody else answers for.
    assert len(scripted_client.waited) < len(scripted_client.slept)
    assert (talk.stats.requests, talk.stats.sampled_tokens) == (1, 2)


async def test_tries_wait_longer_until_there_is_another_backend(scripted_client: Scripted) -> None:
    talk = scripted_client.session()
    scripted_client.answers = [DOWN, DOWN, DOWN, DOWN, DOWN, BUSY, DOWN, DOWN, _sample()]
    scripted_client.routes = [
        RouteResponse(backend=_at("a")),
        RouteResponse(backend=_at("b")),
        RouteResponse(backend=None, retry_after=3600.0),
        RouteResponse(backend=_at("c")),
    ]
    await talk.turn([1], 8, 0)
    assert [name for name, _, _ in scripted_client.asked] == ["a"] * 4 + ["b"] * 4 + ["c"]
    assert [(name, blame) for name, _, blame in scripted_client.routed] == [
        ("a", True), ("a", True), ("b", False), ("b", True),
    ]  # fmt: skip
    # The same backend again, another one at once, which begins with short waits, and none for a while.
    assert scripted_client.slept == [0.25, 0.5, 1.0, 0.0, 0.25, 5.0, 1.0, 0.0]
    assert scripted_client.waited == [5.0]


async def test_a_long_retry_after_is_bounded(scripted_client: Scripted) -> None:
    talk = scripted_client.session(budget=100.0)
    scripted_client.answers = [BackendUnavailable("x" * 2000, retry_after=99.0), DOWN, _sample()]
    await talk.turn([1], 8, 0)
    assert scripted_client.slept == [30.0, 0.5]
    scripted_client.answers = [DOWN, BackendUnavailable("y" * 2000), _sample()]
    await talk.turn([1], 8, 1)
    assert scripted_client.routed[-1][1] == "y" * 1024, "a message has a bound"


async def test_impossible_answers_end_a_rollout_only_in_a_row(scripted_client: Scripted) -> None:
    wrong = BackendMismatch("odd")
    talk = scripted_client.session()
    for turn in range(2):
        scripted_client.answers = [wrong, wrong, _sample()]
        await talk.turn([1], 8, turn)
    scripted_client.answers = [wrong, wrong, wrong, _sample()]
    scripted_client.routes = [RouteResponse(backend=_at(name)) for name in "bcd"]
    with pytest.raises(BackendMismatch, match="odd"):
        await talk.turn([1], 8, 2)
    assert [name for name, _, _ in scripted_client.asked[-3:]] == ["a", "b", "c"]
    assert all(blame for _, _, blame in scripted_client.routed)
    assert await talk.silence() is None, "an answer that came is no silence"
    assert len(scripted_client.asked) == 9


async def test_any_id_outside_of_the_vocabulary_is_noticed(scripted_client: Scripted) -> None:
    talk = scripted_client.session()
    talk.vocabulary = 7
    scripted_client.answers = [
        Sample((7, 1), (-0.5, -0.5), ("v", "v"), "stop"),
        Sample((), (), (), "abort"),
        _sample(),
    ]
    sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (5, 6)
    assert scripted_client.routed[0][2] is True


async def test_an_abort_at_the_last_token_is_the_end(scripted_client: Scripted) -> None:
    talk = scripted_client.session()
    scripted_client.answers = [_sample(2, "abort"), _sample(3, "abort")]
    sample = await talk.turn([1], 5, 0)
    assert (sample.token_ids, sample.finish_reason) == ((5, 6, 5, 6, 7), "length")
    assert [one.max_tokens for _, _, one in scripted_client.asked] == [5, 3]


async def test_a_turn_is_made_to_fit_a_smaller_context(scripted_client: Scripted) -> None:
    """The limits that servers name may be wrong, so each try has fewer tokens than the one before."""
    talk = scripted_client.session()
    full = ContextOverflow("too long", 12)
    scripted_client.answers = [_sample(2, "abort"), full, full, full, full]
    sample = await talk.turn([1] * 4, 20, 0)
    assert [(len(ids), one.max_tokens) for _, ids, one in scripted_client.asked] == [
        (4, 20), (6, 18), (6, 6), (6, 5), (6, 4),
    ]  # fmt: skip
    assert (sample.token_ids, sample.finish_reason) == ((5, 6), "length"), "what was sampled is kept"
    assert (talk.stats.requests, talk.stats.sampled_tokens) == (1, 2)
    assert scripted_client.routed == []
    for limit in (4, 3, None):
        scripted_client.answers = [ContextOverflow("too long", limit)]
        with pytest.raises(ContextOverflow):
            await talk.turn([1] * 4, 20, 1)
    scripted_client.answers = [ContextOverflow("too long", 5), _sample(1, "length")]
    assert len((await talk.turn([1] * 4, 20, 2)).token_ids) == 1


async def test_answers_across_updates_are_counted_and_asked_again(scripted_client: Scripted) -> None:
    talk = scripted_client.session()
    changed = [WeightsChanged("changed", discarded=3), WeightsChanged("changed", discarded=4)]
    scripted_client.answers = [_sample(2, "abort"), *changed, _sample(first=7)]
    sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (5, 6, 7, 8)
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens, talk.stats.requests) == (4, 7, 4)
    assert [ids for _, ids, _ in scripted_client.asked] == [[1], [1, 5, 6], [1, 5, 6], [1, 5, 6]]
    assert len({one.seed for _, _, one in scripted_client.asked[1:]}) == 1


async def test_all_waits_for_verified_weights_of_a_turn_have_one_limit(
    scripted_client: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_UPDATE_SECONDS", 3.0)
    talk = scripted_client.session()
    scripted_client.always = _sample(version="unverified:v1")
    # It waits for 0.25, 0.5 and 1 s, then for 0.25, 0.5 and 1 s again.
    scripted_client.labels = ["unverified:v1", "unverified:v1", "v1", "unverified:v1", "unverified:v1", None]
    with pytest.raises(BackendUnavailable, match="not verified within 3 s"):
        await talk.turn([1], 8, 0)
    assert scripted_client.waited == [0.25, 0.5, 1.0] * 2
    assert (talk.stats.discarded_tokens, talk.stats.sampled_tokens) == (6, 0)
    # The next turn has the whole time again. A backend that does not tell its label is asked for tokens.
    scripted_client.waited.clear()
    scripted_client.labels = ["unverified:v1", DOWN, None]
    scripted_client.answers = [_sample(version="unverified:v1")] * 2 + [_sample()]
    assert (await talk.turn([1], 8, 1)).policy_versions == ("v", "v")
    assert scripted_client.waited == [0.25, 0.5, 0.25]


async def test_a_rollout_knows_the_logprobs_of_all_its_backends(scripted_client: Scripted) -> None:
    talk = scripted_client.session()
    scripted_client.modes = {"a": ["unknown", "raw_logprobs", "unknown"], "b": ["processed_logprobs"]}
    modes = []
    for turn, answers in enumerate([[_sample()], [_sample()], [_sample()], [DOWN, DOWN, _sample()]]):
        scripted_client.answers = list(answers)
        scripted_client.routes = [RouteResponse(backend=_at("b"))]
        await talk.turn([1], 8, turn)
        modes.append(talk.logprobs_mode)
    # What is unknown is asked again, and what is known is not.
    assert modes == ["unknown", "raw_logprobs", "raw_logprobs", "mixed"]


async def test_an_outage_is_asked_about_at_each_try(scripted_client: Scripted) -> None:
    talk = scripted_client.session(budget=3.0, outage_seconds=50.0)
    scripted_client.always = DOWN
    none = RouteResponse(backend=None, retry_after=2.0, reason="NoBackendReady")
    scripted_client.routes = [none] * 100
    with pytest.raises(PipelineError, match="no ready backend for 50 s; last: down"):
        await talk.turn([1], 8, 0)
    assert scripted_client.slept == [0.25] + [2.0] * 25
    assert talk.waited_seconds == 50.0, "what the pool lacks is not the policy's time"
    assert talk.model_seconds == pytest.approx(0.25)
    assert all(blame for _, _, blame in scripted_client.routed)


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
