"""Names of warm sandbox pods: numbered upwards, so that none is used again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

REMEMBERED = 4096
"""The numbers of this many flavors are remembered; those of a flavor that is forgotten start again."""


class Named(Protocol):
    """A sandbox pod, as far as its name goes."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def flavor(self) -> str: ...


def warm_name(flavor: str, number: int) -> str:
    """Name of a pod that is made for whoever claims it."""
    return f"sbw-{flavor}-{number}"


class WarmNumbers:
    """The first number, of each namespace and flavor, above all that were seen.

    Who lists pods after a while without a watch takes another pod of the same name for the same pod,
    changed. kube-scheduler 1.36 was seen to end over it ("scheduler cache is corrupted") after the API
    server had been away. Nothing else depends on these numbers: operators that remember different ones,
    or none, do right.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, str], int] = {}

    def see(self, pods: Iterable[Named]) -> Mapping[tuple[str, str], int]:
        """Remember the numbers of these pods; returns what is known after that."""
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
