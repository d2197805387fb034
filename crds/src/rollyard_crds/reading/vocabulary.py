"""The hash of a tokenizer's vocabulary, by which a trainer notices that its token ids mean something else.

Comparing files would not do, because libraries write the same tokenizer in many ways. What must agree is
which token each id stands for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from rollyard_crds.errors import CrdsError

T = TypeVar("T")

FILE: Final = "tokenizer.json"
MAX_FILE: Final = 64 << 20
"""The largest tokenizer.json that is read, in bytes. Those of large vocabularies have about 30 MB."""
MAX_ID: Final = 2**31 - 1


class TokenizerInvalid(CrdsError, ValueError):
    """Raised if a tokenizer's files are missing or have no vocabulary. The message names the file."""

    reason = "TokenizerInvalid"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The properties by which two tokenizers are compared."""

    sha256: str
    """The SHA-256 of one line for each token, ordered by id and then by token: the id in decimal, a space,
    the token as an ASCII JSON string, and a line feed. Added tokens are included."""
    size: int
    """The number of tokens."""


def of_tokens(ids: Mapping[str, int]) -> Vocabulary:
    """Return the vocabulary of a map from each token to its id, such as `get_vocab()` of transformers.

    Raises:
        TokenizerInvalid: It is empty, or holds something else.
    """
    if not ids:
        raise TokenizerInvalid("the tokenizer has no tokens")
    digest = hashlib.sha256()
    for token, number in sorted(ids.items(), key=_by_id):
        digest.update(f"{number} {json.dumps(token)}\n".encode())
    return Vocabulary(digest.hexdigest(), len(ids))


def _by_id(item: tuple[Any, Any]) -> tuple[int, str]:
    token, number = item
    if not isinstance(token, str) or type(number) is not int or not 0 <= number <= MAX_ID:
        raise TokenizerInvalid(f"a token has no valid id: it must be a whole number from 0 to {MAX_ID}")
    return number, token


def of_file(path: Path) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json, as the tokenizers library writes it.

    Raises:
        TokenizerInvalid: The file cannot be read, is too large, or has no vocabulary.
    """

    def made(document: Any) -> Vocabulary:
        return of_tokens(dict(model_tokens(document)) | dict(added_tokens(document)))

    return read(path, made, str(path))


def read(path: Path, make: Callable[[Any], T], name: str) -> T:
    """Return what `make` makes of a decoded tokenizer.json.

    Args:
        path: The file.
        make: Takes the document. What it raises because the document has another form becomes the error
            below.
        name: The file in messages.

    Raises:
        TokenizerInvalid: The file cannot be read, is too large, or has another form.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise TokenizerInvalid(f"{name} has more than {MAX_FILE} bytes")
        return make(orjson.loads(data))
    except TokenizerInvalid:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        # The fault is not quoted, because the path may be that of another file.
        raise TokenizerInvalid(
            f"{name} is not a {FILE} with a vocabulary ({type(error).__name__})"
        ) from error


def model_tokens(document: Any) -> list[tuple[Any, Any]]:
    """Return the tokens of the model in a tokenizer.json, each with its id. They are not checked."""
    entries = document["model"]["vocab"]
    return list(entries.items()) if isinstance(entries, dict) else [(e[0], n) for n, e in enumerate(entries)]


def added_tokens(document: Any) -> list[tuple[Any, Any]]:
    """Return the tokens in a tokenizer.json that were added to the model's, in the same form."""
    return [(token["content"], token["id"]) for token in document.get("added_tokens") or ()]
