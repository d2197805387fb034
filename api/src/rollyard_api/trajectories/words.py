"""The words of a conversation as hashes, by which a search finds the rollouts that may have them.

A word is a run of letters, digits and underscores, in upper or lower case. The hashes are CRC-32, four bytes
each, sorted and joined. Two words may share a hash, and one may be found across the bounds of two others, so
a search reads the records that it finds.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final

from rollyard_api.core.codec import dumps

MAX_WORDS: Final = 4096
"""The number of words of one conversation that are kept: the first different ones."""
MAX_CHARACTERS: Final = 256 << 10
"""The number of characters of one conversation that are read for its words."""
_BYTES: Final = 4
_WORD: Final = re.compile(r"\w+")


def words_in(text: str) -> Iterator[str]:
    """Return the words of a text in lower case."""
    return (match.group() for match in _WORD.finditer(text.lower()))


def hash_of(word: str) -> bytes:
    """Return the hash of a word in lower case."""
    return zlib.crc32(word.encode("utf-8", "surrogatepass")).to_bytes(_BYTES)


def texts_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Return the texts of a record's conversations: those of its messages, and the arguments of its calls.

    Those of the rollout's own conversation come first.
    """
    branches = (branch.get("messages") or () for branch in record.get("branches") or ())
    for message in chain(record.get("messages") or (), *branches):
        thought = message.get("reasoning_content")
        if isinstance(thought, str):
            yield thought
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif content:
            yield dumps(content).decode()
        for call in message.get("tool_calls") or ():
            yield dumps(call).decode()


def hashes(texts: Iterable[str]) -> bytes:
    """Return the sorted hashes of the different words of some texts."""
    digests: dict[bytes, None] = {}
    room = MAX_CHARACTERS
    for text in texts:
        for word in words_in(text[:room]):
            digests[hash_of(word)] = None
            if len(digests) >= MAX_WORDS:
                return b"".join(sorted(digests))
        room -= len(text)
        if room <= 0:
            break
    return b"".join(sorted(digests))


def has_all(texts: Iterable[str], needed: Iterable[str]) -> bool:
    """Return whether the texts together have all of these words, which are in lower case."""
    missing = set(needed)
    for text in texts:
        if not missing:
            return True
        missing.difference_update(words_in(text))
    return not missing
