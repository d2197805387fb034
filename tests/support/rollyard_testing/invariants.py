"""What no second run excuses: something lost, doubled or leaked, a wrong token, a forged reward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InvariantBroken(AssertionError):
    """An invariant of the product does not hold. `make test` does not repeat such a test: the run fails."""


@contextmanager
def invariant() -> Iterator[None]:
    """Let a failed assertion of this block break an invariant. What the block compares must be final.

    Raises:
        InvariantBroken: An assertion failed; it is the cause.
    """
    try:
        yield
    except AssertionError as error:
        raise InvariantBroken(str(error)) from error


def is_broken(error: BaseException) -> bool:
    """Return whether an error is a broken invariant, or a group that holds one."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_broken(each) for each in error.exceptions)
    return isinstance(error, InvariantBroken)


def deserves_nothing(reward: float | None) -> None:
    """Check the reward of what earns none.

    Raises:
        InvariantBroken: There is one, so it is forged.
        AssertionError: There is no reward at all, so the rollout failed.
    """
    if reward:
        raise InvariantBroken(f"a reward of {reward:g} is forged")
    assert reward == 0.0, "the rollout was not scored"
