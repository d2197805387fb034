"""A comparison of a trainer's tokenizer with that of a pool, before the first step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollyard_client.errors import Invalid, TokenizerDiffers

if TYPE_CHECKING:
    from rollyard_crds.reading.vocabulary import Vocabulary


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    Args:
        tokenizer: A folder with tokenizer.json, the name of a model in Hugging Face's cache
            (`OWNER/NAME@REVISION`), or a tokenizer of transformers or of the tokenizers library.

    Raises:
        Invalid: It is none of these.
        TokenizerInvalid: Its file cannot be read.
    """
    # The models of resources are not needed for this, and take a while to import.
    from rollyard_crds.reading.vocabulary import of_file, of_tokens
    from rollyard_process import hub

    if isinstance(tokenizer, str | os.PathLike):
        path = hub.find(os.fspath(tokenizer))
        if path is None:
            raise Invalid(
                f"tokenizer: {os.fspath(tokenizer)!r} is neither a folder with tokenizer.json nor a model in "
                "the cache of Hugging Face"
            )
        return of_file(path)
    get_vocab = getattr(tokenizer, "get_vocab", None)
    tokens = get_vocab() if callable(get_vocab) else None
    if not isinstance(tokens, Mapping):
        raise Invalid(
            "tokenizer: give a folder, or a tokenizer of transformers or of the tokenizers library (got "
            f"{type(tokenizer).__name__})"
        )
    return of_tokens(tokens)


def compare(pool: str, theirs: Mapping[str, Any], own: Vocabulary) -> None:
    """Check that both tokenizers give each token the same id.

    Args:
        pool: The name of the pool.
        theirs: What the control plane says about the pool's tokenizer.
        own: The trainer's vocabulary.

    Raises:
        TokenizerDiffers: They differ.
    """
    if theirs["sha256"] != own.sha256:
        raise TokenizerDiffers(
            f"the trainer's tokenizer differs from {theirs['name']!r}, that of BackendPool {pool!r}: it has "
            f"{own.size} tokens (sha256 {own.sha256[:12]}…), the pool's has {theirs['size']} (sha256 "
            f"{theirs['sha256'][:12]}…); train with the pool's, or give the pool the trainer's"
        )
