"""Pauses between tries grow, stay within their bound, and respect what the other side asks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_process.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=3.0)
    assert [backoff.pause(failures) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_another_factor() -> None:
    backoff = Backoff(first=1.0, longest=100.0, factor=1.5)
    assert [backoff.pause(failures) for failures in (1, 2, 3)] == [1.0, 1.5, 2.25]


@given(
    failures=st.integers(min_value=0, max_value=10**9),
    jitter=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    retry_after=st.none() | st.floats(min_value=0.0, max_value=1e9),
)
def test_no_number_of_failures_exceeds_the_bound(
    failures: int, jitter: float, retry_after: float | None
) -> None:
    pause = Backoff(first=0.1, longest=5.0, jitter=jitter).pause(failures, retry_after)
    assert (1 - jitter) * 0.1 <= pause <= 5.0
    assert pause >= min(retry_after or 0.0, 5.0)


def test_jitter_is_a_fraction_of_the_pause() -> None:
    backoff = Backoff(first=8.0, longest=8.0, jitter=0.25)
    pauses = {backoff.pause(1) for _ in range(200)}
    assert len(pauses) > 100
    assert min(pauses) >= 6.0
    assert max(pauses) <= 8.0


@pytest.mark.parametrize(("asked", "pause"), [(None, 1.0), (0.5, 1.0), (2.0, 2.0), (60.0, 4.0)])
def test_what_the_other_side_asks_for(asked: float | None, pause: float) -> None:
    assert Backoff(first=1.0, longest=4.0).pause(1, asked) == pause
