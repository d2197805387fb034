"""The token bucket gives never more than it says, and no less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rollyard_process.token_bucket import TokenBucket


@given(
    st.floats(0.1, 100.0),
    st.integers(1, 50),
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 60)), max_size=40),
)
def test_the_rate_is_kept_over_every_window(
    per_second: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    bucket, now, taken = TokenBucket(per_second, burst), 0.0, [(0.0, 0)]
    for pause, wish in steps:
        now += pause
        given_out = min(wish, int(bucket.tokens(now)))
        bucket.take(now, given_out)
        taken.append((now, given_out))
    for index, (begin, _) in enumerate(taken):
        total = 0
        for end, count in taken[index:]:
            total += count
            assert total <= burst + per_second * (end - begin) + 1e-6


def test_quiet_fills_it_to_the_burst_and_no_further() -> None:
    bucket = TokenBucket(2.0, 5)
    bucket.take(0.0, 5)
    assert bucket.tokens(1.0) == 2.0
    assert bucket.tokens(100.0) == 5.0
    bucket.take(100.0)
    bucket.give_back()
    assert bucket.tokens(100.0) == 5.0
    assert bucket.tokens(50.0) == 5.0, "a clock that goes back takes nothing away"
