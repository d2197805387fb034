"""The scheduler and its prefix cache over a fake model whose logits are a function of the ids it has seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rollyard_engine.errors import EngineError
from rollyard_engine.folder import ModelFolder
from rollyard_engine.generation.sampling import Logits, SamplingParams
from rollyard_engine.generation.scheduler import (
    DONOR_IDLE_SECONDS,
    PREFILL_BUDGET,
    PREFILL_CHUNK,
    PauseMode,
    PrefixCache,
    Scheduler,
    SchedulerLimits,
)
from rollyard_engine.generation.sequence import Sequence

VOCABULARY = 40
EOS = 2


class FakeCache:
    """A cache that remembers its ids. The greedy next token is a hash of them all and of the model's salt."""

    def __init__(self, model: FakeModel, capacity: int) -> None:
        self.model, self.capacity, self.ids = model, capacity, np.empty(0, dtype=np.int32)

    @property
    def length(self) -> int:
        return len(self.ids)

    def append(self, token_ids: NDArray[np.int32]) -> Logits:
        self.ids = np.concatenate([self.ids, token_ids])
        assert len(self.ids) <= self.capacity
        self.model.appended.append(len(token_ids))
        if self.model.broken:
            raise RuntimeError("the runtime failed")
        logits = np.zeros(VOCABULARY, dtype=np.float32)
        logits[self.model.next_token(self.ids.tolist())] = 9.0
        return logits

    def rewind(self, length: int) -> None:
        self.ids = self.ids[:length]


class FakeModel:
    """A model whose weights are one number."""

    def __init__(self, salt: int = 0, vocabulary: int = VOCABULARY, context: int = 4096) -> None:
        self.folder = ModelFolder(Path(f"salt-{salt}"), context, vocabulary, (EOS,), 1, 1)
        self.salt = salt
        self.appended: list[int] = []
        self.broken = False

    def next_token(self, ids: list[int]) -> int:
        return 3 + hash((self.salt, *ids)) % (VOCABULARY - 3)

    def open(self, capacity: int) -> FakeCache:
        return FakeCache(self, capacity)


def make_scheduler(model: FakeModel, eos: int = EOS, **limits: int) -> Scheduler:
    bounds = {"max_model_len": 4096, "max_num_seqs": 4, "max_kept": 8, "cache_bytes": 1 << 20} | limits
    return Scheduler(model, "v1", (eos,), SchedulerLimits(**bounds))


def make_sequence(prompt: list[int], max_tokens: int = 5, **params: Any) -> Sequence:
    return Sequence(
        "id", np.array(prompt, dtype=np.int32), SamplingParams(max_tokens, temperature=0.0, **params),
        max_model_len=4096, every=0, on_progress=lambda: None,
    )  # fmt: skip


def run_until(scheduler: Scheduler, done: Callable[[], bool], most: int = 1000) -> None:
    for _ in range(most):
        if done():
            return
        scheduler.step()
    raise AssertionError("the scheduler did not get there")


def run_until_idle(scheduler: Scheduler) -> None:
    run_until(scheduler, lambda: not scheduler.has_work)


def run_to_end(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)
    run_until(scheduler, lambda: all(sequence.finished for sequence in sequences))


def ids(sequence: Sequence) -> list[int]:
    return [token.token_id for token in sequence.output]


def expected(model: FakeModel, prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(model.next_token(sequence))
    return sequence[len(prompt) :]


def test_a_prompt_is_scored_by_one_set_of_weights_and_not_from_a_kept_cache() -> None:
    old, new = FakeModel(), FakeModel(salt=1)
    scheduler = make_scheduler(old)
    prompt = list(range(3, 33))
    kept = make_sequence(prompt, ignore_eos=True)
    scheduler.add(kept)
    run_until_idle(scheduler)
    scored = make_sequence(prompt, 3, ignore_eos=True, prompt_logprobs=1)
    scheduler.add(scored)
    run_until(scheduler, lambda: len(scored.prompt_scores) == 20)
    assert scored.cached_tokens == 0
    assert set(old.appended[-20:]) == {1}
    scheduler.swap_model(new)
    run_until(scheduler, lambda: len(scored.output) == 1)
    swapped_later = list(scored.prompt_scores)
    scheduler.swap_model(old)  # The prompt has its scores, which stay, and it is computed in pieces again.
    run_until_idle(scheduler)
    assert old.appended[-2:] == [31, 1]
    assert scored.prompt_scores == swapped_later
    assert [token.token_id for token in scored.prompt_scores] == prompt[1:]
    assert [token.top[0][0] for token in scored.prompt_scores] == [
        new.next_token(prompt[:length]) for length in range(1, len(prompt))
    ]


def test_every_token_depends_on_all_before_it_however_long_the_prompt() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model)
    prompts = [[5] * 3, [6] * (PREFILL_CHUNK + 1), [7] * (3 * PREFILL_BUDGET)]
    sequences = [make_sequence(prompt) for prompt in prompts]
    run_to_end(scheduler, *sequences)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert ids(sequence) == expected(model, prompt, 5)
        assert sequence.finish_reason == "length"


def test_decoding_goes_on_while_long_prompts_are_computed() -> None:
    scheduler = make_scheduler(FakeModel())
    short = make_sequence([5, 6], max_tokens=50)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(make_sequence([7] * (PREFILL_BUDGET * 4)))
    scheduler.add(make_sequence([8] * (PREFILL_BUDGET * 4)))
    for _ in range(4):
        before = len(short.output)
        scheduler.step()
        assert len(short.output) == before + 1


def test_with_a_slow_model_a_step_is_short_and_still_all_get_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollyard_engine.generation.scheduler.SLICE_SECONDS", 0.0)
    model = FakeModel()
    scheduler = make_scheduler(model)
    sequences = [make_sequence([5, index + 3]) for index in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    for turn in range(1, 4):
        for _ in sequences:
            calls = len(model.appended)
            scheduler.step()
            assert len(model.appended) == calls + 1
        assert [len(sequence.output) for sequence in sequences] == [turn] * 4


def test_stop_tokens_end_a_sequence_and_are_part_of_it() -> None:
    model = FakeModel()
    tokens = expected(model, [5, 6, 7], 3)
    scheduler = make_scheduler(model)
    sequence = make_sequence([5, 6, 7], max_tokens=50, stop_token_ids=frozenset({tokens[2]}))
    run_to_end(scheduler, sequence)
    assert (ids(sequence), sequence.finish_reason, sequence.stop_reason) == (tokens, "stop", tokens[2])


def test_end_of_sequence_ends_it_unless_ignored() -> None:
    model = FakeModel()
    tokens = expected(model, [5, 6, 7], 8)
    end = tokens.index(tokens[3])
    for ignore in (False, True):
        scheduler = make_scheduler(model, eos=tokens[3])
        sequence = make_sequence([5, 6, 7], max_tokens=8, ignore_eos=ignore)
        run_to_end(scheduler, sequence)
        assert ids(sequence) == (tokens if ignore else tokens[: end + 1])
        assert (sequence.finish_reason, sequence.stop_reason) == ("length" if ignore else "stop", None)


def test_no_more_run_than_there_are_slots_and_all_get_their_turn() -> None:
    scheduler = make_scheduler(FakeModel(), max_num_seqs=3)
    sequences = [make_sequence([5, index + 3]) for index in range(10)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not all(s.finished for s in sequences):
        scheduler.step()
        assert len(scheduler.running) <= 3


def test_caches_stay_within_their_memory() -> None:
    scheduler = make_scheduler(FakeModel(), max_num_seqs=8, cache_bytes=2048, max_model_len=2048)
    sequences = [make_sequence([5, index + 3] * 20) for index in range(12)]
    for sequence in sequences:
        scheduler.add(sequence)
    while not all(s.finished for s in sequences):
        scheduler.step()
        assert scheduler.cache_usage <= 1.0
    assert scheduler.cache_usage > 0.0


def test_the_next_turn_computes_only_what_is_new() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model)
    first = make_sequence([5] * 100)
    run_to_end(scheduler, first)
    model.appended.clear()
    turn = [*([5] * 100), *ids(first), 9, 9, 9]
    second = make_sequence(turn)
    run_to_end(scheduler, second)
    assert second.cached_tokens == 104  # The last sampled token was never run through the model.
    assert model.appended == [4, 1, 1, 1, 1]
    assert ids(second) == expected(model, turn, 5)
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (100 + 108, 104)


def test_an_aborted_sequence_keeps_what_it_has_and_frees_its_slot() -> None:
    scheduler = make_scheduler(FakeModel(), max_num_seqs=1)
    running, waiting = make_sequence([5], max_tokens=100), make_sequence([6], max_tokens=100)
    scheduler.add(running)
    scheduler.add(waiting)
    for _ in range(3):
        scheduler.step()
    scheduler.abort(waiting)
    scheduler.abort(running)
    scheduler.abort(running)
    assert (len(running.output), running.finish_reason) == (3, "abort")
    assert (len(waiting.output), waiting.finish_reason) == (0, "abort")
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.stats.finished_requests["abort"] == 2


def test_keep_freezes_and_tokens_after_a_swap_come_from_the_new_weights() -> None:
    old, new = FakeModel(1), FakeModel(2)
    scheduler = make_scheduler(old)
    sequence = make_sequence([5] * 200, max_tokens=9)
    scheduler.add(sequence)
    run_until(scheduler, lambda: len(sequence.output) == 4)
    paused: list[bool] = []
    scheduler.pause("keep", clear_cache=True, when_paused=lambda: paused.append(True))
    assert paused == [True]
    assert not scheduler.has_work
    late = make_sequence([8])
    scheduler.add(late)
    assert not scheduler.has_work
    scheduler.swap_model(new)
    scheduler.version = "v2"
    scheduler.resume()
    run_until(scheduler, lambda: sequence.finished and late.finished)
    before = expected(old, [5] * 200, 4)
    assert ids(sequence) == [*before, *expected(new, [*([5] * 200), *before], 5)]
    spans = [(span.version, span.start, span.end) for span in sequence.version_spans()]
    assert spans == [("v1", 0, 4), ("v2", 4, 9)]
    assert {token.version for token in late.output} == {"v2"}


def test_wait_lets_the_running_finish_and_starts_nothing() -> None:
    scheduler = make_scheduler(FakeModel(), max_num_seqs=1)
    running, waiting = make_sequence([5]), make_sequence([6])
    scheduler.add(running)
    scheduler.add(waiting)
    scheduler.step()
    paused: list[bool] = []
    scheduler.pause("wait", clear_cache=True, when_paused=lambda: paused.append(True))
    assert not paused
    while scheduler.has_work:
        scheduler.step()
    assert paused == [True]
    assert running.finish_reason == "length"
    assert not waiting.output
    scheduler.resume()
    run_until(scheduler, lambda: waiting.finished)


@pytest.mark.parametrize(
    ("mode", "clear", "cached"),
    [
        ("abort", True, 0),
        ("abort", False, 104),
        ("wait", True, 0),
        ("wait", False, 104),
        ("keep", True, 104),
        ("keep", False, 104),
    ],
)
def test_a_pause_drops_the_kept_caches_where_it_is_asked_to(
    mode: PauseMode, clear: bool, cached: int
) -> None:
    scheduler = make_scheduler(FakeModel())
    first = make_sequence([5] * 100)
    run_to_end(scheduler, first)
    scheduler.pause(mode, clear_cache=clear, when_paused=lambda: None)
    scheduler.resume()
    second = make_sequence([*([5] * 100), *ids(first), 9])
    run_to_end(scheduler, second)
    assert second.cached_tokens == cached


@pytest.mark.parametrize("end", ["finish", "resume", "abort", "keep"])
def test_everybody_who_waits_for_a_pause_is_answered_once(end: str) -> None:
    scheduler = make_scheduler(FakeModel())
    running = make_sequence([5], max_tokens=20)
    scheduler.add(running)
    scheduler.step()
    told: list[str] = []
    for name in ("first", "second"):
        scheduler.pause("wait", clear_cache=False, when_paused=lambda name=name: told.append(name))
    scheduler.step()
    assert not told
    if end == "finish":
        run_until(scheduler, lambda: running.finished)
    elif end == "resume":
        scheduler.resume()
    elif end == "abort":
        scheduler.pause("abort", clear_cache=False, when_paused=lambda: told.append("third"))
        assert running.finish_reason == "abort"
    else:
        scheduler.pause("keep", clear_cache=False, when_paused=lambda: told.append("third"))
        assert not running.finished
    assert sorted(told) == sorted(["first", "second", *(["third"] if end in ("abort", "keep") else [])])
    scheduler.resume()
    assert len(told) == len(set(told))


def test_requests_are_aborted_by_their_ids_wherever_they_are() -> None:
    scheduler = make_scheduler(FakeModel(), max_num_seqs=2)
    every = [make_sequence([5 + number], max_tokens=50) for number in range(5)]
    for number, sequence in enumerate(every):
        sequence.request_id = f"r{number}"
        scheduler.add(sequence)
    scheduler.step()
    scheduler.step()
    assert scheduler.abort_ids(["r1", "r3", "unknown"]) == 2
    assert [sequence.finish_reason for sequence in every] == [None, "abort", None, "abort", None]
    assert [len(sequence.output) for sequence in every] == [2, 2, 0, 0, 0]
    assert scheduler.abort_ids(["r1"]) == 0
    assert scheduler.abort_ids([]) == 0
    assert set(scheduler.take_progressed()) == {every[1], every[3]}
    assert scheduler.abort_ids(None) == 3
    assert [sequence.finish_reason for sequence in every] == ["abort"] * 5
    assert not scheduler.has_work


def test_a_reset_lets_running_sequences_begin_again_only_where_it_is_asked_to() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model)
    every = [make_sequence([5] * 10, max_tokens=9), make_sequence([6] * 20, max_tokens=9)]
    for sequence in every:
        scheduler.add(sequence)
    scheduler.step()
    model.appended.clear()
    scheduler.reset_prefix_cache(running_too=False)
    scheduler.step()
    assert model.appended == [1, 1]
    model.appended.clear()
    scheduler.reset_prefix_cache(running_too=True)
    scheduler.step()
    assert model.appended == [12, 22]
    run_until(scheduler, lambda: all(sequence.finished for sequence in every))
    assert [ids(sequence) for sequence in every] == [
        expected(model, [5] * 10, 9),
        expected(model, [6] * 20, 9),
    ]


def test_each_end_is_counted_as_what_it_was() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model)
    stop = expected(model, [5], 2)[1]
    ends = [
        make_sequence([5], max_tokens=9, stop_token_ids=frozenset({stop})),
        make_sequence([6], max_tokens=2, ignore_eos=True),
        make_sequence([7], max_tokens=1, ignore_eos=True),
    ]
    run_to_end(scheduler, *ends)
    failing = make_sequence([8])
    scheduler.add(failing)
    model.broken = True
    scheduler.step()
    assert failing.finished
    assert scheduler.stats.finished_requests == {"stop": 1, "length": 2, "abort": 0, "error": 1}
    assert scheduler.stats.prompt_tokens == 4
    assert scheduler.stats.generation_tokens == 2 + 2 + 1


def test_a_swap_forgets_the_kept_caches_and_refuses_what_does_not_fit() -> None:
    scheduler = make_scheduler(FakeModel(1))
    first = make_sequence([5] * 100)
    run_to_end(scheduler, first)
    with pytest.raises(EngineError, match="vocabulary of 7 tokens"):
        scheduler.swap_model(FakeModel(2, vocabulary=7))
    with pytest.raises(EngineError, match="context of 64 tokens") as refused:
        scheduler.swap_model(FakeModel(2, context=64))
    assert (refused.value.reason, refused.value.status) == ("ModelFolderInvalid", 400)
    scheduler.swap_model(FakeModel(2))
    second = make_sequence([*([5] * 100), *ids(first), 9])
    run_to_end(scheduler, second)
    assert second.cached_tokens == 0


def test_a_failure_of_the_runtime_fails_that_request_only() -> None:
    model = FakeModel()
    scheduler = make_scheduler(model)
    failing = make_sequence([5])
    scheduler.add(failing)
    model.broken = True
    scheduler.step()
    model.broken = False
    assert "the runtime failed" in failing.error.message
    healthy = make_sequence([5])
    run_to_end(scheduler, healthy)
    assert ids(healthy) == expected(model, [5], 5)


class TestPrefixCache:
    """The choice of a kept cache for a prompt."""

    @staticmethod
    def kept(tokens: list[int], capacity: int = 512) -> tuple[NDArray[np.int32], FakeCache]:
        cache = FakeCache(FakeModel(), capacity)
        cache.ids = np.array(tokens, dtype=np.int32)
        return cache.ids, cache

    def test_the_longest_conversation_that_the_prompt_extends(self) -> None:
        store = PrefixCache(8)
        short, long = self.kept([1] * 10), self.kept([1] * 20)
        for item in (short, long):
            store.put(*item, now=0.0)
        assert store.take(np.array([1] * 20 + [4], dtype=np.int32), 30, now=0.0) is long[1]
        assert store.capacity_tokens == 512

    def test_a_fresh_conversation_is_not_cut_back_for_another(self) -> None:
        store = PrefixCache(8)
        tokens, cache = self.kept([1] * 50 + [2] * 50)
        store.put(tokens, cache, now=0.0)
        other = np.array([1] * 50 + [3] * 9, dtype=np.int32)
        assert store.take(other, 100, now=DONOR_IDLE_SECONDS / 2) is None
        assert store.take(other, 100, now=DONOR_IDLE_SECONDS) is cache
        assert cache.length == 50

    def test_the_last_prompt_token_is_always_computed(self) -> None:
        store = PrefixCache(8)
        tokens, cache = self.kept([1] * 50)
        store.put(tokens, cache, now=0.0)
        assert store.take(np.array([1] * 50, dtype=np.int32), 60, now=0.0) is cache
        assert cache.length == 49

    def test_a_cache_without_room_is_left(self) -> None:
        store = PrefixCache(8)
        store.put(*self.kept([1] * 50, capacity=64), now=0.0)
        assert store.take(np.array([1] * 60, dtype=np.int32), 65, now=9.0) is None
        assert len(store) == 1

    def test_the_oldest_goes_first(self) -> None:
        store = PrefixCache(2)
        items = [self.kept([index] * 40) for index in (1, 2, 3)]
        for item in items:
            store.put(*item, now=0.0)
        assert len(store) == 2
        assert store.take(np.array([1] * 41, dtype=np.int32), 50, now=9.0) is None
        assert store.take(np.array([2] * 41, dtype=np.int32), 50, now=9.0) is items[1][1]
