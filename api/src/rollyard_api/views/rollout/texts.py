"""The texts of tokens, byte for byte, from the tokenizer of a pool where this machine has it.

A token may be a part of a character. Such bytes are shown as escapes, so that the texts of all tokens
together neither lose nor invent anything. The vocabulary is read from the file itself, with the rules that
byte-level and SentencePiece tokenizers have for their pieces, because decoders of whole texts repair what is
broken.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rollyard_crds.reading.vocabulary import TokenizerInvalid, added_tokens, model_tokens, read
from rollyard_process import hub

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.problems import ApiError

MAX_KEPT: Final = 4
"""The number of vocabularies in memory."""
MAX_PIECES: Final = 1 << 20
"""The largest number of tokens of a vocabulary. Larger ones are refused."""
MAX_PIECE_BYTES: Final = 256
"""The bytes of a token that are shown."""
LOOK_SECONDS: Final = 30.0
"""The time after which a tokenizer that could not be read is tried again."""
_SPACE: Final = "\u2581"


Pieces = Mapping[int, bytes]
"""The bytes of each token by its id; ids that the vocabulary lacks have none."""


def texts_of(pieces: Pieces | str, ids: Sequence[int]) -> list[str] | None:
    """Return the text of each of these tokens, or None if `pieces` says why there are none."""
    return None if isinstance(pieces, str) else [shown(pieces.get(number)) for number in ids]


def shown(piece: bytes | None) -> str:
    r"""Return a token's bytes as text: those that are not UTF-8 as \xNN, and an unknown token as `<?>`."""
    if piece is None:
        return "<?>"
    return piece[:MAX_PIECE_BYTES].decode("utf-8", "backslashreplace")


def _byte_letters() -> dict[str, int]:
    """Return the byte for each letter of byte-level vocabularies.

    They write each byte as a printable character: GPT-2's table keeps the printable ones of Latin-1 and
    shifts the others to 256 and beyond.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in printable)
    table |= {chr(256 + index): byte for index, byte in enumerate(shifted)}
    return table


_BYTES: Final = _byte_letters()


def pieces(document: Any) -> Pieces:
    """Return the pieces of a decoded tokenizer.json. This call belongs in a thread.

    Raises:
        TokenizerInvalid: It has too many tokens.
        ValueError, LookupError, TypeError, AttributeError: It has no vocabulary of a known kind.
    """
    known, added = model_tokens(document), added_tokens(document)
    if len(known) + len(added) > MAX_PIECES:
        raise TokenizerInvalid(f"its vocabulary has more than {MAX_PIECES} tokens")
    kinds = _kinds(document.get("decoder"))
    of = _of_letters if "ByteLevel" in kinds else partial(_of_text, fallback="ByteFallback" in kinds)
    by_id = {number: of(token) for token, number in known if type(number) is int}
    # Added tokens are written as they are, in either kind of vocabulary.
    by_id |= {number: token.encode("utf-8", "replace") for token, number in added if type(number) is int}
    return by_id


def _kinds(decoder: Any) -> set[str]:
    """Return the types of a decoder and of the decoders in it."""
    listed = [decoder, *(decoder.get("decoders") or ())] if isinstance(decoder, dict) else []
    return {str(entry.get("type")) for entry in listed if isinstance(entry, dict)}


def _of_letters(token: str) -> bytes:
    codes = [_BYTES.get(letter) for letter in token]
    if None in codes:
        return token.encode("utf-8", "replace")
    return bytes(byte for byte in codes if byte is not None)


def _of_text(token: str, *, fallback: bool) -> bytes:
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode("utf-8", "replace")


class TokenTexts:
    """The vocabularies that were used last, by the tokenizer that pools name.

    Args:
        threads: The threads in which files are read.
    """

    def __init__(self, threads: Bulkhead) -> None:
        self._threads = threads
        self._kept: OrderedDict[str, tuple[float, Pieces | str]] = OrderedDict()

    async def of(self, tokenizer: str, namespace: str) -> Pieces | str:
        """Return the pieces of a pool's tokenizer, or why they cannot be read here."""
        looked, vocabulary = self._kept.get(tokenizer, (0.0, None))
        if vocabulary is None or (isinstance(vocabulary, str) and time.monotonic() - looked > LOOK_SECONDS):
            # Two requests at once may both read the file, which is better than one that waits for the other's
            # read from a disk that hangs.
            vocabulary = await self._look(tokenizer, namespace)
            self._kept[tokenizer] = (time.monotonic(), vocabulary)
        self._kept.move_to_end(tokenizer)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return vocabulary

    async def _look(self, tokenizer: str, namespace: str) -> Pieces | str:
        def look() -> Pieces | str:
            path = hub.find(tokenizer)
            if path is None:
                return (
                    "the control plane sees no tokenizer.json of it: set spec.tokenizer of the pool to a "
                    "folder that it can read"
                )
            return read(path, pieces, "its tokenizer.json")

        try:
            return await self._threads.run(look, namespace)
        except (TokenizerInvalid, ApiError) as error:
            return str(error)
