"""The selection of tasks from a list: repeated tasks dropped, a limit, a seeded order, and epochs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

from rollyard_crds.rolloutjob import TaskSource

T = TypeVar("T")

_EPOCH: Final = re.compile(r":epoch\d+\Z")
_MAX_ID: Final = 128
_IGNORED: Final = frozenset({"id", "metadata"})
_HASH_BYTES: Final = 16


def epoch_id(task: str, epoch: int) -> str:
    """Return the id of a task in an epoch: its own in the first one, then `ID:epoch2` and so on."""
    return task if epoch == 1 else f"{task}:epoch{epoch}"


class TaskSelection(Generic[T]):
    """The tasks of one list, which are kept until their order is known.

    A hash of 16 bytes is kept of each task where repeated ones are dropped. With a limit, at most twice as
    many tasks as the limit are kept, however long the list is.

    Args:
        source: The part of the job's spec with the options.
    """

    def __init__(self, source: TaskSource | None = None) -> None:
        self._limit = source.limit if source is not None else None
        self._epochs = (source.epochs if source is not None else None) or 1
        shuffle = source.shuffle if source is not None else None
        self._seed = None if shuffle is None else shuffle.seed
        self._hashes: set[bytes] | None = set() if source is not None and source.deduplicate else None
        self._digest: bytes | None = None
        self._kept: list[tuple[str, T]] = []

    @property
    def epochs(self) -> int:
        """The number of times that each task is rolled out."""
        return self._epochs

    @property
    def full(self) -> bool:
        """Whether no later task of the list can be selected."""
        return self._seed is None and self._limit is not None and len(self._kept) >= self._limit

    def problem(self, task: str) -> str | None:
        """Return why an id cannot be used in several epochs, or None if it can."""
        if self._epochs == 1:
            return None
        if _EPOCH.search(task):
            return "id: must not end in ':epoch' and a number in a list of several epochs"
        longest = len(epoch_id(task, self._epochs))
        return None if longest <= _MAX_ID else f"id: is too long for {self._epochs} epochs"

    def repeated(self, document: dict[str, Any]) -> bool:
        """Return whether an earlier task is the same except for its id and metadata.

        Otherwise `add` may be called for this task, before this method is called for another one.
        """
        if self._hashes is None:
            return False
        rest = {key: value for key, value in document.items() if key not in _IGNORED}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).digest()
        # A row that is refused after this is not a task, so an equal one may follow it.
        self._digest = digest
        return digest in self._hashes

    def add(self, task: str, value: T) -> None:
        """Take the next task of the list."""
        if self._hashes is not None and self._digest is not None:
            self._hashes.add(self._digest)
        if self.full:
            return
        self._kept.append((task, value))
        if self._limit is not None and self._seed is not None and len(self._kept) >= 2 * self._limit:
            self._kept = list(self._ordered(1))[: self._limit]

    def __len__(self) -> int:
        """Return the number of tasks in all epochs together."""
        count = len(self._kept) if self._limit is None else min(len(self._kept), self._limit)
        return count * self._epochs

    def chosen(self) -> Iterator[tuple[int, str, T]]:
        """Yield the number of the epoch, the id in it, and what was kept of each task, in their order."""
        self._kept = list(self._ordered(1))[: self._limit]
        for epoch in range(1, self._epochs + 1):
            for task, value in self._ordered(epoch):
                yield epoch, epoch_id(task, epoch), value

    def _ordered(self, epoch: int) -> Iterable[tuple[str, T]]:
        if self._seed is None:
            return self._kept
        # The order depends on the ids alone, so every version and machine finds the same one.
        return sorted(self._kept, key=lambda item: _key(self._seed, epoch, item[0]))


def _key(seed: int | None, epoch: int, task: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{epoch}/{task}".encode(), digest_size=_HASH_BYTES).digest()
