"""Names of warm sandbox pods. The numbers in them only increase, so no name is used twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

REMEMBERED = 4096
"""The number of flavors whose numbers are remembered. A forgotten flavor starts at 0 again."""


class Named(Protocol):
    """The attributes of a sandbox pod that its name depends on."""

    @property
    def namespace(self) -> str:
        """The namespace of the pod."""

    @property
    def name(self) -> str:
        """The name of the pod."""

    @property
    def flavor(self) -> str:
        """The flavor of the sandbox."""


def warm_name(flavor: str, number: int) -> str:
    """Return the name of a warm pod, which any claim of this flavor may take."""
    return f"sbw-{flavor}-{number}"


class WarmNumbers:
    """The first number above all numbers seen, for each namespace and flavor.

    A client that lists pods after a gap in its watch mistakes a new pod with an old name for a change of the
    old pod. kube-scheduler 1.36 was seen to exit for that reason ("scheduler cache is corrupted") after the
    API server had been away. Nothing else depends on these numbers: operators that remember different
    numbers, or none, still work correctly.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, str], int] = {}

    def see(self, pods: Iterable[Named]) -> Mapping[tuple[str, str], int]:
        """Remember the numbers of these pods and return all numbers known after that."""
        for pod in pods:
            digits = pod.name.rpartition("-")[2]
            if not (digits.isascii() and digits.isdecimal()):
                continue
            number = int(digits)
            key = pod.namespace, pod.flavor
            if warm_name(pod.flavor, number) == pod.name and number >= self._next.get(key, 0):
                self._next[key] = number + 1
        while len(self._next) > REMEMBERED:
            self._next.pop(next(iter(self._next)))
        return self._next
